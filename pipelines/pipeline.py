"""Assembly: a split, its reader and its order become batches. The face of this room."""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from pipelines import augment as augment_lib
from pipelines import features as features_lib
from pipelines import memory, source
from pipelines.config import DataConfig
from pipelines.errors import UserError
from pipelines.order import Order, example_seeds
from pipelines.synthetic import SyntheticReader

_log = logging.getLogger(__name__)

WEIGHT = "_weight"  # float32: 1 for an example, 0 for padding
INDEX = "_index"  # int64: the example's position in its split

Batch = dict[str, tf.Tensor]

# A chunk is several batches in one tf.data element, so that the per-element overhead is paid once.
# It should stay in a core's cache and hold few enough steps to answer a signal soon.
_CHUNK_BYTES = 2 << 20
_MAX_CHUNK_STEPS = 128
_CHUNKS_AHEAD = 2


class Reader(Protocol):
    """Random access to the examples of a split."""

    name: str
    num_examples: int

    def fetch(self, positions: tf.Tensor) -> dict[str, tf.Tensor]:
        """Examples at int64 [m] positions as tensors [m, ...]; called while a graph is traced."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The batches of one split, in an order that is arithmetic.

    A batch is a dictionary: the dataset's features as stored, `WEIGHT` (float32 [batch_size], 0 for
    padding) and `INDEX` (int64 [batch_size], positions in the split). Steps count over epochs: step
    s is batch s % steps_per_epoch of epoch s // steps_per_epoch.
    """

    reader: Reader
    order: Order
    spec: features_lib.Spec
    augment: augment_lib.AugmentFn | None = None
    num_parallel_calls: int | None = None
    prefetch_batches: int | None = None

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

    def reseeded(self, salt: int) -> "Pipeline":
        """The same examples in another order, one for each `salt` > 0."""
        seed = self.order.seed + salt * 0x10001
        return dataclasses.replace(self, order=dataclasses.replace(self.order, seed=seed))

    def batches(self, first_step: int = 0, num_epochs: int | None = None) -> tf.data.Dataset:
        """Batches one by one from `first_step` on, to the end of `num_epochs` (None: endless)."""
        dataset = self._dataset(first_step, _Chunking(self.steps_per_epoch, 1, 1), num_epochs)
        return dataset.map(lambda chunk: {key: t[0] for key, t in chunk.items()})

    def chunks(
        self, first_step: int = 0, num_epochs: int | None = None, max_steps: int | None = None
    ) -> Iterator[tuple[Batch, int]]:
        """Batches stacked to chunks, as the training loop consumes them.

        Args:
          first_step: step of the first batch.
          num_epochs: epochs from step 0 after which to end; None: never.
          max_steps: most steps in a chunk; None: chosen from the size of a batch.

        Yields:
          (chunk of tensors [k, batch_size, ...] with k the same for all, number of steps of it that
          count: k, or fewer at the end of a round of epochs).
        """
        chunking = self.chunking(max_steps, num_epochs)
        step = first_step
        for chunk in self._dataset(first_step, chunking, num_epochs):
            num_steps = chunking.steps_at(step)
            yield chunk, num_steps
            step += num_steps

    def chunking(self, max_steps: int | None = None, num_epochs: int | None = None) -> "_Chunking":
        """How steps are stacked to chunks for these arguments of `chunks`."""
        if num_epochs:  # then a round must not go beyond one epoch
            max_steps = min(max_steps or _MAX_CHUNK_STEPS, self.steps_per_epoch)
        limit = max(1, min(_MAX_CHUNK_STEPS, _CHUNK_BYTES // self._batch_bytes()))
        limit = min(limit, max_steps or limit)
        return _Chunking.choose(self.steps_per_epoch, limit)

    def element_spec(self, num_epochs: int | None = None) -> dict[str, tf.TensorSpec]:
        """Types of a chunk of `chunks(num_epochs=num_epochs)`, without reading."""
        return self._dataset(0, self.chunking(None, num_epochs), 1).element_spec

    def stages(self, first_step: int = 0) -> list[tuple[str, tf.data.Dataset, int]]:
        """The stages of what `chunks` iterates, each with all those before it; for measuring.

        Returns:
          (name, dataset up to and with that stage, examples in one of its elements) of each stage;
          the last is what training consumes. Datasets are endless.
        """
        stages = self._stages(first_step, self.chunking(), None)
        options = _options()
        return [(name, dataset.with_options(options), size) for name, dataset, size in stages]

    def _batch_bytes(self) -> int:
        spec = tf.data.Dataset.from_tensors(0).map(
            lambda _: self.reader.fetch(tf.zeros([1], tf.int64))
        )
        row = sum(t.dtype.size * t.shape.num_elements() for t in spec.element_spec.values())
        return row * self.batch_size

    def _dataset(self, first_step, chunking, num_epochs) -> tf.data.Dataset:
        """Chunks [k, batch_size, ...] from `first_step` on."""
        _, dataset, _ = self._stages(first_step, chunking, num_epochs)[-1]
        return dataset.with_options(_options())

    def _stages(self, first_step, chunking, num_epochs) -> list[tuple[str, tf.data.Dataset, int]]:
        """See `stages`; one map does all from reading to batching, so a stage is a part of it."""
        order = self._positions(first_step, chunking, num_epochs)
        size = chunking.chunk_steps * self.batch_size
        stages = [("order", order, size)]
        parts = {
            "read": lambda epochs, positions, weights: self.reader.fetch(positions),
            "augment": lambda epochs, positions, weights: self._examples(epochs, positions),
            "batch": lambda *slots: self._chunk(chunking, *slots),
        }
        if not self.augment:
            del parts["augment"]
        for name, part in parts.items():
            calls = self.num_parallel_calls or num_cores()
            dataset = order.map(part, num_parallel_calls=calls, deterministic=True)
            stages.append((name, dataset, size))
        ahead = -(-(self.prefetch_batches or 0) // chunking.chunk_steps) or _CHUNKS_AHEAD
        return [*stages, ("prefetch", dataset.prefetch(ahead), size)]

    def _positions(self, first_step, chunking, num_epochs) -> tf.data.Dataset:
        """(epochs, positions, weights) of each chunk, each [chunk_steps * batch_size]."""
        order, size = self.order, self.batch_size
        first_round, first_step_in_round = divmod(first_step, chunking.round_steps)
        num_rounds = num_epochs or 2**62  # with an end, a round is one epoch
        slots_per_round = chunking.round_steps * size

        def round_of_epochs(index):
            epochs = index * chunking.round_epochs + tf.range(chunking.round_epochs, dtype=tf.int64)
            if chunking.round_epochs == 1:
                positions = order.epoch(epochs[0])
            else:
                positions = tf.reshape(tf.map_fn(order.epoch, epochs), [-1])
            weights = tf.tile(order.weights(), [chunking.round_epochs])
            epochs = tf.repeat(epochs, order.steps_per_epoch * size)
            start = tf.where(index == first_round, first_step_in_round, 0)
            starts = tf.data.Dataset.range(
                tf.cast(start, tf.int64), chunking.round_steps, chunking.chunk_steps
            )

            def slices(step):
                slots = step * size + tf.range(chunking.chunk_steps * size, dtype=tf.int64)
                slots = tf.minimum(slots, slots_per_round - 1)
                return tuple(tf.gather(t, slots) for t in (epochs, positions, weights))

            return starts.map(slices)

        return tf.data.Dataset.range(first_round, num_rounds).flat_map(round_of_epochs)

    def _examples(self, epochs, positions) -> Batch:
        examples = self.reader.fetch(positions)
        if self.augment:
            examples = self.augment(examples, example_seeds(self.order.seed, epochs, positions))
        return examples

    def _chunk(self, chunking, epochs, positions, weights) -> Batch:
        examples = self._examples(epochs, positions)
        examples = {**examples, WEIGHT: weights, INDEX: positions}
        shape = [chunking.chunk_steps, self.batch_size]
        return {key: tf.reshape(t, [*shape, *t.shape[1:]]) for key, t in examples.items()}


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _options() -> tf.data.Options:
    options = tf.data.Options()
    # Fixed numbers measured as fast as tuned ones, and releasing a tuned iterator can stall.
    options.autotune.enabled = False
    options.threading.private_threadpool_size = num_cores()
    options.threading.max_intra_op_parallelism = 1
    options.deterministic = True
    return options


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


@dataclasses.dataclass(frozen=True)
class Data:
    """A dataset ready to train on and to evaluate.

    Attributes:
      name: full TFDS name, with configuration and without version.
      version: the dataset's version.
      train: the training pipeline, None if only evaluation was asked for.
      evaluation: the evaluation pipeline, None if only training was asked for.
      spec: what a model must accept and return.
    """

    name: str
    version: str
    train: Pipeline | None
    evaluation: Pipeline | None
    spec: features_lib.Spec


def load_data(
    config: DataConfig,
    training: bool = True,
    evaluating: bool = True,
    numeric_labels: bool = False,
) -> Data:
    """Opens the dataset and builds the pipelines asked for.

    Args:
      config: which data, and how it becomes batches.
      training: whether `Data.train` is wanted.
      evaluating: whether `Data.evaluation` is wanted.
      numeric_labels: take integer labels as numbers to predict, not as classes.

    Raises:
      UserError: for whatever in `config` the dataset cannot honour; told before data is read where
        it can be known.
    """
    _refuse_unsupported(config)
    builder = source.open_builder(config)
    input_key, label_key = features_lib.choose_keys(
        builder.info, config.input_key, config.label_key
    )
    features = features_lib.usable_features(builder.info, input_key, label_key)
    spec = features_lib.make_spec(builder.info, input_key, label_key, features)
    augment = augment_lib.make_augment_fn(config.augment, spec)
    train_split, eval_split = source.choose_splits(builder, config, evaluating)
    order = Order(
        train_split.num_examples,
        config.batch_size,
        config.seed,
        config.shuffle,
        config.drop_remainder,
    )
    if training:
        _check_batch(order, train_split)
    make_reader = _reader_maker(config, builder, features, spec)
    train = make_reader(train_split) if training else None
    if numeric_labels:
        spec = spec.for_regression()
    elif features_lib.is_integer_label(features[label_key]):
        spec = spec.with_classes(spec.num_classes or _count_classes(config, label_key, train))
    _check_labels(builder, train_split, spec, train)
    evaluation = make_reader(eval_split) if evaluating else None
    _check_labels(builder, eval_split, spec, evaluation)
    shared = {"spec": spec, "num_parallel_calls": config.num_parallel_calls}
    shared["prefetch_batches"] = config.prefetch_batches
    return Data(
        name=builder.info.full_name.rpartition("/")[0],
        version=str(builder.info.version),
        train=train and Pipeline(train, order, augment=augment, **shared),
        evaluation=evaluation and Pipeline(evaluation, _eval_order(config, eval_split), **shared),
        spec=spec,
    )


def _reader_maker(config, builder, features, spec) -> Callable[[source.Split], Reader]:
    if config.use_synthetic_data:
        types = {key: tf.TensorSpec(f.shape, f.tf_dtype) for key, f in features.items()}
        return lambda split: SyntheticReader(types, spec, split.num_examples)
    return lambda split: memory.MemoryReader(memory.read_arrays(builder, split, features))


def _refuse_unsupported(config: DataConfig) -> None:
    if config.reader in ("indexed", "stream"):
        raise UserError(f"--reader={config.reader}: not available yet; choose auto or memory")
    if config.shuffle_window:
        raise UserError("--shuffle_window: only the stream reader has a window")
    if config.image_size:
        raise UserError("--image_size: resizing is not available yet")
    if config.on_bad_record == "skip":
        raise UserError("--on_bad_record=skip: not available yet; choose fail")


def _check_batch(order: Order, split: source.Split) -> None:
    if order.steps_per_epoch == 0:
        raise UserError(
            f"--batch_size={order.batch_size} is larger than the {order.num_examples} examples of "
            f"{split}: choose a smaller one, or --drop_remainder=false"
        )


def _eval_order(config: DataConfig, split: source.Split) -> Order:
    size = config.eval_batch_size or config.batch_size
    return Order(split.num_examples, size, shuffle=False, drop_remainder=False)


def _count_classes(config: DataConfig, label_key: str, reader) -> int | None:
    """Classes of a label that is a plain integer; None if it does not number classes."""
    if config.num_classes or reader is None:
        return config.num_classes
    labels = reader.arrays[label_key]
    if labels.min() < 0:
        _log.info("label %r is an integer with negative values: taken as a number", label_key)
        return None
    num_classes = int(labels.max()) + 1
    _log.info(
        "label %r is a plain integer: taken as one of %d classes, counted in the training split",
        label_key,
        num_classes,
    )
    return num_classes


def _check_labels(builder: tfds.core.DatasetBuilder, split, spec, reader) -> None:
    """Refuses labels that no model output stands for; a GPU would train on them to NaN."""
    if reader is None:
        return
    labels = reader.arrays[spec.label_key]
    if spec.num_classes:
        wrong = (labels < 0) | (labels >= spec.num_classes)
        meant = f"outside 0..{spec.num_classes - 1}"
    elif labels.dtype.kind == "f":
        wrong, meant = ~np.isfinite(labels).reshape(len(labels), -1).all(1), "not finite"
    else:
        return
    if wrong.any():
        at = int(np.argmax(wrong))
        raise UserError(
            f"{builder.info.full_name}, split {split}: {int(wrong.sum())} of {len(labels)} labels "
            f"{spec.label_key!r} are {meant}, first {labels[at]} at example {at}"
        )
