"""The order law: which examples form batch k, as arithmetic.

Positions number a split's examples in file order, from 0. The order of an epoch is a permutation
of the positions that depends on (seed, epoch, number of examples) alone, so any batch of any epoch
is found without visiting those before it, and threads, replicas and restarts cannot change it.
"""

import dataclasses

import tensorflow as tf

# Sorting random keys is the faster permutation up to here; above it, and without a table in
# memory, a cipher with enough rounds to mix well. (index_shuffle's default of 4 does not: epochs of
# 60,000 correlate at 0.9.)
_MAX_SORTED = 10_000_000
_CIPHER_ROUNDS = 12
_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive seeds over all bits


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
    """

    num_examples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_remainder: bool = True

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
          int64 [steps_per_epoch * batch_size] positions. Those at and after `num_examples` repeat
          the last batch's own examples, so that its statistics stay its own.
        """
        slots = tf.range(self.steps_per_epoch * self.batch_size, dtype=tf.int64)
        tail = self.num_examples % self.batch_size
        if not self.drop_remainder and tail:
            start = self.num_examples - tail
            slots = tf.where(slots < self.num_examples, slots, start + (slots - start) % tail)
        return permute(slots, self.num_examples, self.seed, epoch) if self.shuffle else slots

    def weights(self) -> tf.Tensor:
        """float32 [steps_per_epoch * batch_size]: 1 for an example, 0 for padding."""
        slots = tf.range(self.steps_per_epoch * self.batch_size, dtype=tf.int64)
        return tf.cast(slots < self.num_examples, tf.float32)

    def batch(self, step: int) -> list[int]:
        """Positions of the examples that form batch `step` (counted over epochs), without padding.

        For people and tests; the pipeline uses `epoch`.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        first = index * self.batch_size
        stop = min(first + self.batch_size, self.num_examples)
        return [int(p) for p in self.epoch(epoch)[first:stop]]


def permute(slots: tf.Tensor, size: int, seed: int, epoch: tf.Tensor | int) -> tf.Tensor:
    """Maps slots of an epoch to positions: a permutation of range(size) drawn by (seed, epoch).

    Args:
      slots: int64 tensor of values in [0, size).
      size: number of examples.
      seed: any non-negative integer.
      epoch: int64 scalar.

    Returns:
      int64 tensor shaped like `slots`.
    """
    words = _seed_words(seed, epoch)
    if size > _MAX_SORTED:
        return tf.raw_ops.RandomIndexShuffle(
            index=slots,
            seed=tf.bitcast(tf.concat([words, words[:1] ^ 0x5BD1E995], 0), tf.uint32),
            max_index=tf.cast(size - 1, tf.int64),
            rounds=_CIPHER_ROUNDS,
        )
    table = tf.random.experimental.stateless_shuffle(
        tf.range(size, dtype=tf.int64), seed=words, alg="philox"
    )
    return tf.gather(table, slots)


def _seed_words(seed: int, epoch: tf.Tensor | int) -> tf.Tensor:
    """int32 [2] hashed from (seed, epoch)."""
    mixed = hash64(tf.cast(epoch, tf.uint64) + tf.constant((seed * _MIX) % 2**64, tf.uint64))
    return tf.bitcast(mixed, tf.int32)


def hash64(x: tf.Tensor) -> tf.Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014), element by element.

    Args:
      x: uint64 tensor.

    Returns:
      uint64 tensor of the same shape; every input bit affects every output bit.
    """
    shift, xor = tf.bitwise.right_shift, tf.bitwise.bitwise_xor
    x = x + tf.constant(_MIX, tf.uint64)
    x = xor(x, shift(x, tf.constant(30, tf.uint64))) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    x = xor(x, shift(x, tf.constant(27, tf.uint64))) * tf.constant(0x94D049BB133111EB, tf.uint64)
    return xor(x, shift(x, tf.constant(31, tf.uint64)))


def example_seeds(seed: int, epochs: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """One stateless seed per example and epoch, whatever else is in its batch.

    Args:
      seed: the run's seed.
      epochs: int64 [m].
      positions: int64 [m].

    Returns:
      int32 [m, 2].
    """
    # The salt keeps augmentation apart from the permutation of the same (seed, epoch).
    base = tf.constant((seed * _MIX + 0xA5A5A5A5) % 2**64, tf.uint64)
    by_epoch = hash64(tf.cast(epochs, tf.uint64) + base)
    return tf.bitcast(hash64(by_epoch + tf.cast(positions, tf.uint64)), tf.int32)
