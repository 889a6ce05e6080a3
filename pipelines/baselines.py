"""The input pipelines that people write instead, for `pipelines.benchmark --baselines`.

Each yields batches of (float32 inputs in [0, 1], labels) without an end, the way tutorials do.
"""

import logging
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from pipelines import source
from pipelines.bad_records import Explained
from pipelines.config import DataConfig
from pipelines.features import Spec, to_model_input
from pipelines.measure import Items, Subject
from pipelines.memory import free_memory_bytes
from pipelines.pipeline import Pipeline

_log = logging.getLogger(__name__)

_NAIVE_BUFFER = 10_000
_SHARE_OF_FREE_MEMORY = 0.5
_PIXELS_PER_BYTE = 10  # of photographs as they are usually encoded
_IMITATED = (
    "flip",
    "crop",
    "rrc",
    "center",
)  # augmentations that the tutorials' pipelines have too

OpenFn = Callable[[], Items]


def subjects(config: DataConfig, pipeline: Pipeline) -> dict[str, Subject]:
    """The baselines that this data allows, by the name of their row; what is left out is logged.

    Args:
      config: the data.
      pipeline: this package's pipeline of it.
    """
    found: dict[str, OpenFn] = {
        "one_batch": lambda: _items(pipeline.batches(), pipeline.batch_size),
        **({} if config.use_synthetic_data else _through_tfds(config, pipeline)),
        **_from_arrays(pipeline),
    }
    # A buffer that holds a whole epoch is filled at once and then emptied without reading.
    period = pipeline.num_examples if pipeline.num_examples <= _NAIVE_BUFFER else 1
    periods = {_NAIVE: period, _NAIVE_PARALLEL: period}
    return {
        name: Subject(name, open_fn, pipeline.batch_size, period=periods.get(name, 1))
        for name, open_fn in found.items()
    }


def _items(dataset: tf.data.Dataset, batch_size: int) -> Items:
    for batch in dataset:
        yield batch, batch_size


def _fits(names: str, num_bytes: float) -> bool:
    """Whether that much can be held; if not, logs which baselines are left out."""
    fits = num_bytes <= _SHARE_OF_FREE_MEMORY * free_memory_bytes()
    if not fits:
        _log.info("baselines: no %s: %.1f GB to hold", names, num_bytes / 1e9)
    return fits


# Through TFDS.

_NAIVE, _NAIVE_PARALLEL = "baseline:naive", "baseline:naive_parallel"


def _through_tfds(config: DataConfig, pipeline: Pipeline) -> dict[str, OpenFn]:
    others = [name for name in config.augment if name not in _IMITATED]
    if others:
        _log.info("baselines: those through TFDS leave out --augment=%s", ",".join(others))
    found, float_bytes = {}, 4 * int(np.prod(pipeline.spec.input_shape))
    if _fits("naive", min(pipeline.num_examples, _NAIVE_BUFFER) * float_bytes):
        found[_NAIVE] = lambda: _naive(config, pipeline, None)
        found[_NAIVE_PARALLEL] = lambda: _naive(config, pipeline, tf.data.AUTOTUNE)
    cached = pipeline.num_examples * float_bytes
    if pipeline.spec.varies_in_size:
        cached = _tfds_split(config)[1].num_bytes * _PIXELS_PER_BYTE
    if _fits("tfds_guide", cached):
        found["baseline:tfds_guide"] = lambda: _tfds_guide(config, pipeline)
    return found


def _naive(config: DataConfig, pipeline: Pipeline, num_parallel_calls: int | None) -> Items:
    """Map, a shuffle buffer, batch, prefetch; decoded anew each epoch.

    A map without `num_parallel_calls` is made parallel by TensorFlow unless it draws randomly.
    """
    dataset = _tfds(config).map(_prepare_fn(config, pipeline.spec), num_parallel_calls)
    dataset = dataset.shuffle(_NAIVE_BUFFER).repeat().batch(pipeline.batch_size)
    dataset = Explained(dataset.prefetch(tf.data.AUTOTUNE), "the naive pipeline", None)
    return _items(dataset, pipeline.batch_size)


def _tfds_guide(config: DataConfig, pipeline: Pipeline) -> Items:
    """The order of TFDS's performance guide: cache, full shuffle, batch, prefetch.

    What is random comes after the cache. Images of one size are cached as floats, as the guide's
    example has it, others as they are decoded.
    """
    dataset, prepare = _tfds(config), _prepare_fn(config, pipeline.spec)
    random = config.augment or pipeline.spec.input_shape != _shape(dataset, pipeline.spec)
    if not random:
        dataset = dataset.map(prepare, tf.data.AUTOTUNE)
    dataset = dataset.cache().shuffle(pipeline.num_examples).repeat()
    if random:
        dataset = dataset.map(prepare, tf.data.AUTOTUNE)
    dataset = dataset.batch(pipeline.batch_size).prefetch(tf.data.AUTOTUNE)
    return _items(Explained(dataset, "the pipeline of TFDS's guide", None), pipeline.batch_size)


def _tfds_split(config: DataConfig):
    """The builder, and its own account of the training split."""
    builder = source.open_builder(config)
    split, _ = source.choose_splits(builder, config, evaluating=False)
    return builder, builder.info.splits[split.name]


def _tfds(config: DataConfig) -> tf.data.Dataset:
    builder, split = _tfds_split(config)
    return builder.as_dataset(split=split.name, read_config=tfds.ReadConfig(try_autocache=False))


def _shape(dataset: tf.data.Dataset, spec: Spec) -> tuple[int | None, ...]:
    return tuple(dataset.element_spec[spec.input_key].shape)


def _prepare_fn(config: DataConfig, spec: Spec):
    """One example as (input, label): cropped and resized where needed, scaled to floats."""

    def prepare(example):
        inputs = example[spec.input_key]
        if spec.is_image:
            inputs = _augmented(inputs, spec.input_shape, config.augment)
        return to_model_input(inputs), example[spec.label_key]

    return prepare


def _augmented(image: tf.Tensor, shape: tuple[int, ...], names: tuple[str, ...]) -> tf.Tensor:
    dtype, varies = image.dtype, None in tuple(image.shape)
    if "rrc" in names or (varies and "center" not in names):
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.shape(image),
            tf.zeros([0, 0, 4]),
            area_range=(0.08, 1.0),
            use_image_if_no_bounding_boxes=True,
        )
        image = tf.slice(image, begin, size)
    if tuple(image.shape) != shape:
        image = tf.cast(tf.image.resize(image, shape[:2]), dtype)
        image = tf.ensure_shape(image, shape)
    if "crop" in names:
        pads = [side // 8 for side in shape[:2]]
        padded = [side + 2 * pad for side, pad in zip(shape, pads, strict=False)]
        image = tf.image.random_crop(tf.image.pad_to_bounding_box(image, *pads, *padded), shape)
    return tf.image.random_flip_left_right(image) if "flip" in names else image


# From arrays in memory.


def _from_arrays(pipeline: Pipeline) -> dict[str, OpenFn]:
    size = pipeline.batch_size
    count = pipeline.order.steps_per_epoch * size
    float_bytes = 4 * count * int(np.prod(pipeline.spec.input_shape))
    if not _fits("numpy and keras_arrays", 2 * float_bytes):  # as they are, as floats, a batch
        return {}
    inputs, labels = _epoch_arrays(pipeline, count)
    found = {"baseline:numpy": lambda: _numpy(inputs, labels, size)}
    adapter = _keras_adapter(inputs, labels, size)
    if adapter:
        found["baseline:keras_arrays"] = lambda: _epochs(adapter, size)
    return found


def _epoch_arrays(pipeline: Pipeline, count: int) -> tuple[np.ndarray, np.ndarray]:
    """One epoch, `count` examples, as (inputs as stored, labels)."""
    spec, order = pipeline.spec, pipeline.order
    inputs = labels = None
    done = 0
    for chunk, num_steps in pipeline.chunks(num_epochs=1):
        rows = slice(done, done + num_steps * order.batch_size)
        x, y = (chunk[key][:num_steps].numpy() for key in (spec.input_key, spec.label_key))
        if inputs is None:
            inputs = np.empty([count, *x.shape[2:]], x.dtype)
            labels = np.empty([count, *y.shape[2:]], y.dtype)
        inputs[rows], labels[rows] = x.reshape(-1, *x.shape[2:]), y.reshape(-1, *y.shape[2:])
        done = rows.stop
    return inputs, labels


def _numpy(inputs: np.ndarray, labels: np.ndarray, batch_size: int) -> Items:
    """`take` in a fresh order each epoch, and a multiplication that makes floats."""
    scale = float(to_model_input(tf.ones([], inputs.dtype)))
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(inputs))
        for first in range(0, len(order) - batch_size + 1, batch_size):
            rows = order[first : first + batch_size]
            floats = np.multiply(inputs.take(rows, 0), scale, dtype=np.float32)
            yield (floats, labels.take(rows, 0)), batch_size


def _keras_adapter(inputs: np.ndarray, labels: np.ndarray, batch_size: int):
    """What `model.fit` reads arrays with; None if this Keras keeps it elsewhere."""
    try:
        from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    except ImportError:
        _log.info("baselines: no keras_arrays: this Keras has no such adapter")
        return None
    floats = to_model_input(inputs).numpy()
    return ArrayDataAdapter(floats, labels, batch_size=batch_size, shuffle=True)


def _epochs(adapter, batch_size: int) -> Iterator:
    while True:
        yield from _items(adapter.get_tf_dataset(), batch_size)
