"""Assembly: a split's order and its reader become batches, and batches chunks."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Protocol

import tensorflow as tf

from pipelines import features as features_lib
from pipelines import resources
from pipelines.augment import AugmentFn
from pipelines.bad_records import BAD, BadRecords, Trusting, trusted
from pipelines.order import Order
from pipelines.randomness import example_seeds

WEIGHT = "_weight"  # float32: 1 for an example, 0 for padding and for a skipped record
INDEX = "_index"  # int64: the example's position in its split

Batch = dict[str, tf.Tensor]

# A chunk is several batches in one tf.data element, so that the per-element overhead is paid once.
# It should stay in a core's cache and hold few enough steps to answer a signal soon.
_CHUNK_BYTES = 2 << 20
_MAX_CHUNK_STEPS = 128
_CHUNKS_AHEAD = 2

# Converting Python's control flow, of which there is none, would take a second.
_graph_code = tf.autograph.experimental.do_not_convert


class Reader(Protocol):
    """Random access to the examples of a split.

    Attributes:
      name: what --reader calls it.
      num_examples: examples in the split.
      types: types of one example.
      bad: the records that turned out unusable; None where nothing is read.
      read_calls: how many reads run ahead of decoding; 0: reading is so quick that it happens with
        decoding.
      calls_per_core: calls of the map that run in parallel by default. Those that decode take
        unequal time and hand on in order: with two per core, a slow one leaves no core idle.
      decode: like `decode` below, or None if `read` returns examples.
    """

    name: str
    num_examples: int
    types: dict[str, tf.TensorSpec]
    bad: BadRecords | None
    read_calls: int
    calls_per_core: int

    def read(self, positions: tf.Tensor) -> Batch:
        """What is needed to decode the examples at int64 [m] positions, as tensors [m, ...]."""

    def decode(self, raw: Batch, positions: tf.Tensor, seeds: tf.Tensor, rescue: bool) -> Batch:
        """Examples as tensors [m, ...], with BAD among them if there can be stand-ins.

        One that cannot be decoded fails all, unless it is to be told apart: `rescue`.
        """


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The batches of one split, in an order that is arithmetic.

    A batch is a dictionary: the dataset's features, `WEIGHT` (float32 [batch_size], 0 for padding)
    and `INDEX` (int64 [batch_size], positions in the split). Steps count over epochs: step s is
    batch s % steps_per_epoch of epoch s // steps_per_epoch.
    """

    reader: Reader
    order: Order
    spec: features_lib.Spec
    augment: AugmentFn | None = None
    num_parallel_calls: int | None = None
    prefetch_batches: int | None = None
    name: str = "the data"

    @property
    def num_examples(self) -> int:
        """Examples in the split."""
        return self.order.num_examples

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch."""
        return self.order.steps_per_epoch

    @property
    def batch_size(self) -> int:
        """Rows of a batch, padding included."""
        return self.order.batch_size

    @property
    def map_calls(self) -> int:
        """Calls of the map that run in parallel."""
        return self.num_parallel_calls or resources.num_cores() * self.reader.calls_per_core

    @property
    def skipped_records(self) -> int:
        """Records of the split met so far that could not be used and were left out."""
        return len(self.reader.bad or ())

    def reseeded(self, salt: int) -> "Pipeline":
        """The same examples in another order, one for each `salt` > 0."""
        seed = self.order.seed + salt * 0x10001
        return dataclasses.replace(self, order=dataclasses.replace(self.order, seed=seed))

    def batches(self, first_step: int = 0, num_epochs: int | None = None) -> tf.data.Dataset:
        """Batches one by one from `first_step` on, to the end of `num_epochs` (None: endless).

        Raises (when iterated):
          UserError: for a record that cannot be used and is not to be skipped.
        """

        def batches(rescue, taken):
            return self._batches(first_step + taken, num_epochs, rescue)

        return Trusting(batches, self.name, self.reader.bad)

    def _batches(self, first_step, num_epochs, rescue) -> tf.data.Dataset:
        chunking = self.chunking(None, num_epochs)
        dataset = self.dataset(first_step, chunking, num_epochs, rescue)
        if chunking.chunk_steps == 1:
            first = _graph_code(lambda chunk: {key: t[0] for key, t in chunk.items()})
            dataset = dataset.map(first)
        else:  # cutting up a chunk costs less than an element of its own for each batch
            numbers = tf.data.Dataset.range(2**62)
            counts = numbers.map(_graph_code(lambda number: chunking.steps_of(number, first_step)))
            cut = _graph_code(lambda c, count: tf.data.Dataset.from_tensor_slices(c).take(count))
            dataset = tf.data.Dataset.zip(dataset, counts).flat_map(cut)
        return dataset

    def chunks(
        self,
        first_step: int = 0,
        num_epochs: int | None = None,
        max_steps: int | None = None,
        stage: str | None = None,
    ) -> Iterator[tuple[Batch, int]]:
        """Batches stacked to chunks, as the training loop consumes them.

        Args:
          first_step: step of the first batch.
          num_epochs: epochs from step 0 after which to end; None: never.
          max_steps: most steps in a chunk; None: chosen from the size of a batch.
          stage: one of `stage_names`, to measure it with all those before it; None: the last.

        Yields:
          (chunk of tensors [k, batch_size, ...] with k the same for all, number of steps of it that
          count: k, or fewer at the end of a round of epochs).

        Raises:
          UserError: for a record that cannot be used and is not to be skipped.
        """
        chunking = self.chunking(max_steps, num_epochs)
        step = first_step

        def chunks(rescue, taken):
            del taken  # `step` says how far
            return self.dataset(step, chunking, num_epochs, rescue, stage)

        for chunk in trusted(chunks, self.name, self.reader.bad):
            num_steps = chunking.steps_at(step)
            yield chunk, num_steps
            step += num_steps

    def chunking(self, max_steps: int | None = None, num_epochs: int | None = None) -> "_Chunking":
        """How steps are stacked to chunks for these arguments of `chunks`."""
        if num_epochs or self.order.window:  # then a round must not go beyond one epoch
            max_steps = min(max_steps or _MAX_CHUNK_STEPS, self.steps_per_epoch)
        row_bytes = sum(t.dtype.size * t.shape.num_elements() for t in self.reader.types.values())
        limit = max(1, min(_MAX_CHUNK_STEPS, _CHUNK_BYTES // (row_bytes * self.batch_size)))
        limit = min(limit, max_steps or limit)
        return _Chunking.choose(self.steps_per_epoch, limit)

    def element_spec(self, num_epochs: int | None = None) -> dict[str, tf.TensorSpec]:
        """Types of a chunk of `chunks(num_epochs=num_epochs)`, without reading."""
        shown = tf.TensorSpec(self.spec.input_shape, self.spec.input_dtype)
        types = {**self.reader.types, self.spec.input_key: shown}
        types |= {WEIGHT: tf.TensorSpec([], tf.float32), INDEX: tf.TensorSpec([], tf.int64)}
        rows = [self.chunking(None, num_epochs).chunk_steps, self.batch_size]
        return {key: tf.TensorSpec([*rows, *t.shape], t.dtype) for key, t in types.items()}

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The stages of what `chunks` iterates, in their order."""
        return tuple(self._stages(0, self.chunking(), None, False))

    def dataset(
        self,
        first_step: int = 0,
        chunking: "_Chunking | None" = None,
        num_epochs: int | None = None,
        rescue: bool = False,
        stage: str | None = None,
    ) -> tf.data.Dataset:
        """What `chunks` iterates: chunks [k, batch_size, ...], or what a `stage` makes of them.

        With `rescue`, an example that cannot be decoded is told apart; else its chunk fails.
        """
        stages = self._stages(first_step, chunking or self.chunking(), num_epochs, rescue)
        dataset = stages[stage or next(reversed(stages))]()
        resources.end_iterators_at_exit()
        num_threads = resources.num_cores() + self.reader.read_calls  # a read may wait for the disk
        return dataset.with_options(resources.dataset_options(num_threads))

    def _stages(self, first_step, chunking, num_epochs, rescue) -> dict[str, Callable]:
        """Makers of the stages' datasets; what does not wait for a disk is one map, cut short."""
        reader, size = self.reader, chunking.chunk_steps * self.batch_size

        def chunked(dataset):
            return dataset.rebatch(size, drop_remainder=True) if self.order.window else dataset

        def order():
            return self._order(first_step, chunking, num_epochs)

        def read():
            return chunked(
                order().map(_graph_code(self._read), num_parallel_calls=reader.read_calls)
            )

        def mapped(parts):
            @_graph_code
            def apply(slots):
                for part in parts:
                    slots = part(slots)
                return slots

            start = read if reader.read_calls else order
            return start().map(apply, num_parallel_calls=self.map_calls)

        stages = {"order": lambda: chunked(order())}
        parts = {"batch": lambda slots: self._stack(chunking, slots)}
        if self.augment:
            parts = {"augment": self._augment, **parts}
        if reader.decode:
            parts = {"decode": functools.partial(self._decode, rescue), **parts}
        if reader.read_calls:
            stages["read"] = read
        else:
            parts = {"read": self._read, **parts}
        for count, name in enumerate(parts, 1):
            stages[name] = functools.partial(mapped, list(parts.values())[:count])
        ahead = -(-(self.prefetch_batches or 0) // chunking.chunk_steps) or _CHUNKS_AHEAD
        return {**stages, "prefetch": lambda: stages["batch"]().prefetch(ahead)}

    def _order(self, first_step, chunking, num_epochs) -> tf.data.Dataset:
        """Epochs, positions and weights of the examples read together: a chunk's or a window's."""
        order, size = self.order, self.batch_size
        first_round, first_step_in_round = divmod(first_step, chunking.round_steps)
        num_rounds = num_epochs or 2**62  # with an end, a round is one epoch
        chunk_slots, round_slots = chunking.chunk_steps * size, chunking.round_steps * size

        @_graph_code
        def round_of_epochs(index):
            lookup = self._lookup(index * chunking.round_epochs, chunking.round_epochs)
            start = tf.where(index == first_round, first_step_in_round, 0)
            start = tf.cast(start, tf.int64) * size
            # The last chunk is filled up with its last example; `chunks` says what counts.
            stop = start - (start - round_slots) // chunk_slots * chunk_slots

            def piece(first, last):
                slots = tf.minimum(tf.range(first, last, dtype=tf.int64), round_slots - 1)
                if not order.window:
                    slots = tf.ensure_shape(slots, [chunk_slots])
                in_epoch = slots % order.slots_per_epoch
                return {
                    "epochs": index * chunking.round_epochs + slots // order.slots_per_epoch,
                    "positions": lookup(slots),
                    WEIGHT: order.weights(in_epoch),
                }

            if not order.window:
                starts = tf.data.Dataset.range(start, stop, chunk_slots)
                return starts.map(lambda first: piece(first, first + chunk_slots))
            last_window = (min(round_slots, order.num_examples) - 1) // order.window

            def window(i):
                last = tf.where(i == last_window, stop, (i + 1) * order.window)
                return piece(tf.maximum(start, i * order.window), last)

            return tf.data.Dataset.range(start // order.window, last_window + 1).map(window)

        return tf.data.Dataset.range(first_round, num_rounds).flat_map(round_of_epochs)

    def _lookup(self, first_epoch, num_epochs: int):
        """Function from slots of a round of epochs to positions."""
        if num_epochs == 1:
            return self.order.lookup(first_epoch)
        epochs = first_epoch + tf.range(num_epochs, dtype=tf.int64)
        table = tf.reshape(tf.map_fn(self.order.epoch, epochs), [-1])
        return lambda slots: tf.gather(table, slots)

    def _read(self, slots: Batch) -> Batch:
        return {**slots, "raw": self.reader.read(slots["positions"])}

    def _decode(self, rescue: bool, slots: Batch) -> Batch:
        seeds = self._seeds(slots)
        return {**slots, "raw": self.reader.decode(slots["raw"], slots["positions"], seeds, rescue)}

    def _augment(self, slots: Batch) -> Batch:
        slots = self._without_bad(dict(slots))
        return {**slots, "raw": self.augment(slots["raw"], self._seeds(slots))}

    def _seeds(self, slots: Batch) -> tf.Tensor:
        return example_seeds(self.order.seed, slots["epochs"], slots["positions"])

    def _without_bad(self, slots: Batch) -> Batch:
        """Puts in the place of each bad row, at weight 0, the first good one of its batch.

        A copy, as for padding, leaves the statistics of the batch those of its own examples. A
        batch without a good one is zeros: what is not finite is so at weight 0 too.
        """
        examples = dict(slots["raw"])
        bad = examples.pop(BAD, None)
        if bad is None:
            return slots
        bad = tf.reshape(bad, [-1, self.batch_size])
        good_row = tf.argmin(tf.cast(bad, tf.int32), axis=1, output_type=tf.int32)[:, None]
        rows = tf.where(bad, good_row, tf.range(self.batch_size))
        rows += tf.range(bad.shape[0])[:, None] * self.batch_size
        no_good = tf.repeat(tf.reduce_all(bad, axis=1), self.batch_size)
        rows, bad = tf.reshape(rows, [-1]), tf.reshape(bad, [-1])
        examples = {key: tf.gather(tensor, rows) for key, tensor in examples.items()}
        examples = tf.cond(
            tf.reduce_any(no_good),
            lambda: {key: _zeroed(tensor, no_good) for key, tensor in examples.items()},
            lambda: examples,
        )
        return {**slots, "raw": examples, WEIGHT: tf.where(bad, 0.0, slots[WEIGHT])}

    def _stack(self, chunking: "_Chunking", slots: Batch) -> Batch:
        slots = self._without_bad(dict(slots))
        rows = {**slots["raw"], WEIGHT: slots[WEIGHT], INDEX: slots["positions"]}
        shape = [chunking.chunk_steps, self.batch_size]
        return {key: tf.reshape(t, [*shape, *t.shape[1:]]) for key, t in rows.items()}


def _zeroed(tensor: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """A tensor [m, ...] with zeros in the given rows (bool [m])."""
    rows = tf.reshape(rows, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.where(rows, tf.zeros_like(tensor), tensor)


@dataclasses.dataclass(frozen=True)
class _Chunking:
    """How steps are stacked: `chunk_steps` a chunk, no chunk crossing a round of epochs."""

    steps_per_epoch: int
    chunk_steps: int
    round_epochs: int

    @classmethod
    def choose(cls, steps_per_epoch: int, limit: int) -> "_Chunking":
        """Even chunks of an epoch or, where an epoch is shorter than a chunk, of several."""
        if steps_per_epoch <= limit:
            epochs = limit // steps_per_epoch
            return cls(steps_per_epoch, epochs * steps_per_epoch, epochs)
        num_chunks = -(-steps_per_epoch // limit)
        return cls(steps_per_epoch, -(-steps_per_epoch // num_chunks), 1)

    @property
    def round_steps(self) -> int:
        return self.steps_per_epoch * self.round_epochs

    def steps_at(self, step: int) -> int:
        """Steps that count in the chunk that begins at `step`."""
        return min(self.chunk_steps, self.round_steps - step % self.round_steps)

    def steps_of(self, number: tf.Tensor, first_step: int) -> tf.Tensor:
        """The same of the chunk of this number (int64) from `first_step` on; graph code."""
        first = first_step % self.round_steps
        in_first_round = -(-(self.round_steps - first) // self.chunk_steps)
        in_a_round = -(-self.round_steps // self.chunk_steps)
        later = (number - in_first_round) % in_a_round * self.chunk_steps
        step = tf.where(number < in_first_round, first + number * self.chunk_steps, later)
        return tf.minimum(self.round_steps - step, self.chunk_steps)
