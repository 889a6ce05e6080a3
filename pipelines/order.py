"""The order law: which examples form batch k, as arithmetic.

Positions number a split's examples in file order, from 0; slots number the places of an epoch. The
order of an epoch maps slots to positions by a permutation that depends on (seed, epoch) and the
order's own fields alone, so any batch of any epoch is found without visiting those before it, and
threads, replicas and restarts cannot change it.
"""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from pipelines.randomness import epoch_words

# Sorting random keys is the faster permutation up to here; above it, and without a table in
# memory, a cipher with enough rounds to mix well. (index_shuffle's default of 4 does not: epochs of
# 60,000 correlate at 0.9.)
_MAX_SORTED = 10_000_000
_CIPHER_ROUNDS = 12


@dataclasses.dataclass(frozen=True)
class Order:
    """The order in which the examples of one split are visited.

    Attributes:
      num_examples: examples in the split, at least 1.
      batch_size: examples in a batch.
      seed: with the epoch, decides the permutation.
      shuffle: False keeps file order in every epoch.
      drop_remainder: whether the examples that do not fill a batch are left out of an epoch;
        otherwise the last batch is filled up with its own examples at weight 0.
      window: None: every permutation of an epoch is as likely as another. Else blocks of `block`
        neighbours are permuted over the whole split, and `window` examples at a time of what
        follows from that are permuted fully: reading then needs few long reads and no more than
        a window in memory.
      block: neighbours in file order that come together into a window.
    """

    num_examples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_remainder: bool = True
    window: int | None = None
    block: int = 1

    @property
    def slots_per_epoch(self) -> int:
        """Rows of an epoch's batches, padding included."""
        return self.steps_per_epoch * self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        if self.drop_remainder:
            return self.num_examples // self.batch_size
        return -(-self.num_examples // self.batch_size)

    @property
    def examples_per_epoch(self) -> int:
        """Examples visited in one epoch, each once."""
        return min(self.num_examples, self.steps_per_epoch * self.batch_size)

    def epoch(self, epoch: tf.Tensor | int) -> tf.Tensor:
        """Positions in the order of one epoch, padded to whole batches.

        Args:
          epoch: int64 scalar, from 0.

        Returns:
          int64 [slots_per_epoch] positions. Those at and after `num_examples` repeat the last
          batch's own examples, so that its statistics stay its own.
        """
        return self.lookup(epoch)(tf.range(self.slots_per_epoch, dtype=tf.int64))

    def lookup(self, epoch: tf.Tensor | int) -> Callable[[tf.Tensor], tf.Tensor]:
        """Prepares one epoch's order: a function from int64 slots, any shape, to positions."""
        if not self.shuffle:
            return self._unpadded
        if self.window:
            permute = _from_table(self._windowed(epoch))
        else:
            permute = permutation(self.num_examples, epoch_words(self.seed, epoch))
        return lambda slots: permute(self._unpadded(slots))

    def weights(self, slots: tf.Tensor | None = None) -> tf.Tensor:
        """float32 shaped like `slots` (None: all of an epoch): 1 for an example, 0 for padding."""
        if slots is None:
            slots = tf.range(self.slots_per_epoch, dtype=tf.int64)
        return tf.cast(slots < self.num_examples, tf.float32)

    def _unpadded(self, slots: tf.Tensor) -> tf.Tensor:
        """The slots whose examples fill the padded ones."""
        tail = self.num_examples % self.batch_size
        if self.drop_remainder or not tail:
            return slots
        start = self.num_examples - tail
        if self.window:  # then from one window, to be read once
            start = max(start, (self.num_examples - 1) // self.window * self.window)
        tail = self.num_examples - start
        return tf.where(slots < self.num_examples, slots, start + (slots - start) % tail)

    def _windowed(self, epoch: tf.Tensor | int) -> tf.Tensor:
        """int64 [num_examples]: positions, blocks permuted and then each window."""
        size, block = self.num_examples, self.block
        words = epoch_words(self.seed, epoch)
        num_blocks = -(-size // block)
        blocks = permutation(num_blocks, words)(tf.range(num_blocks, dtype=tf.int64))
        rows = blocks[:, None] * block + tf.range(block, dtype=tf.int64)
        rows = tf.boolean_mask(rows, rows < size)
        # Sorting random keys that begin with the window's number permutes within each window.
        keys = tf.cast(_random_words(size, words), tf.int64)
        windows = tf.range(size, dtype=tf.int64) // self.window
        keys += windows * 2**32
        return tf.gather(rows, tf.argsort(keys, stable=True))

    def batch(self, step: int) -> list[int]:
        """Positions of the examples that form batch `step` (counted over epochs), without padding.

        For people and tests; the pipeline uses `epoch`.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        first = index * self.batch_size
        stop = min(first + self.batch_size, self.num_examples)
        return [int(p) for p in self.epoch(epoch)[first:stop]]


def permutation(size: int, words: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
    """A permutation of range(size) drawn by `words` (int32 [2]), as a function of int64 tensors."""
    if size <= _MAX_SORTED:
        table = tf.random.experimental.stateless_shuffle(
            tf.range(size, dtype=tf.int64), seed=words, alg="philox"
        )
        return _from_table(table)
    seed = tf.bitcast(tf.concat([words, words[:1] ^ 0x5BD1E995], 0), tf.uint32)
    return lambda slots: tf.raw_ops.RandomIndexShuffle(
        index=slots,
        seed=seed,
        max_index=tf.constant(size - 1, tf.int64),
        rounds=_CIPHER_ROUNDS,
    )


def _from_table(table: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda slots: tf.gather(table, slots)


def _random_words(size: int, words: tf.Tensor) -> tf.Tensor:
    """uint32 [size] drawn by `words`, independent of the permutation drawn by them."""
    return tf.random.stateless_uniform([size], words ^ 0x3C6EF372, None, None, tf.uint32, "philox")
