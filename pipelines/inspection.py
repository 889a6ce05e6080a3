"""What `pipelines.preview` tells of a dataset: in words, in rows, and in pictures."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from pipelines import memory, plots
from pipelines.assembly import INDEX, WEIGHT, Pipeline
from pipelines.features import Spec, to_model_input
from pipelines.mix import MixFn
from pipelines.pipeline import Data

_LABELS_READ_AT_ONCE = 4096
_MAX_RECORDS_READ = 20_000  # for counting classes, where they have to be read from files
_MAX_NUMBERS = 6
_MAX_CLASSES = 40
_COLUMNS, _CELL_INCHES, _LABEL_CHARS = 8, 1.35, 18


@dataclasses.dataclass(frozen=True)
class Shown:
    """The first rows of a batch as the model receives them.

    Attributes:
      inputs: float32 [rows, ...].
      labels: [rows, ...] as stored or, where examples are mixed, float32 [rows, num_classes].
      index: int64 [rows], positions in the split.
      weight: float32 [rows].
      num_outside: numbers of the inputs outside [0, 1].
    """

    inputs: np.ndarray
    labels: np.ndarray
    index: np.ndarray
    weight: np.ndarray

    @property
    def num_outside(self) -> int:
        return int(np.sum(~((self.inputs >= 0) & (self.inputs <= 1))))


def model_view(pipeline: Pipeline, step: int, num_rows: int, mix_fn: MixFn | None) -> Shown:
    """Takes batch `step` (counted over epochs) of a pipeline the way a training step does."""
    chunk, _ = next(pipeline.chunks(step))
    spec, batch = pipeline.spec, {key: tensor[0] for key, tensor in chunk.items()}
    inputs, labels = to_model_input(batch[spec.input_key]), batch[spec.label_key]
    if mix_fn:
        seed = tf.constant([step % 2**31, pipeline.order.seed % 2**31], tf.int32)  # as in training
        inputs, labels = mix_fn(inputs, tf.one_hot(labels, spec.num_classes), seed)
    parts = (inputs, labels, batch[INDEX], batch[WEIGHT])
    return Shown(*(part[:num_rows].numpy() for part in parts))


# In words.


def description(data: Data) -> Iterator[str]:
    """Lines about the data: spec, splits, memory, classes."""
    spec = data.spec
    yield f"dataset: {data.name} {data.version}"
    yield (
        f"input {spec.input_key!r}: {spec.input_dtype} {list(spec.input_shape)}, "
        f"reaches the model as float32{' in [0, 1]' if _is_scaled(spec) else ', unscaled'}"
    )
    yield f"label {spec.label_key!r}: {_label_words(spec)}"
    others = [key for key in spec.feature_keys if key not in (spec.input_key, spec.label_key)]
    if others:
        yield f"also in a batch: {', '.join(others)}"
    yield from _split_lines("training", data.train)
    yield from _split_lines("evaluation", data.evaluation)
    yield f"memory free: {_mb(memory.free_memory_bytes())}"
    yield from _class_lines(data)


def _is_scaled(spec: Spec) -> bool:
    return spec.input_dtype in ("uint8", "uint16")


def _label_words(spec: Spec) -> str:
    if spec.num_classes is None:
        return f"a number or several to predict, shape {list(spec.label_shape)}"
    return f"one of {spec.num_classes} classes"


def _split_lines(kind: str, pipeline: Pipeline) -> Iterator[str]:
    order, reader = pipeline.order, pipeline.reader
    left_out = order.num_examples - order.examples_per_epoch
    yield (
        f"{kind}: {pipeline.name}: {order.num_examples:,} examples, {order.steps_per_epoch:,} "
        f"steps of {order.batch_size} an epoch" + (f", {left_out} left out" if left_out else "")
    )
    row = sum(t.dtype.size * t.shape.num_elements() for t in reader.types.values())
    chunk_steps = pipeline.chunking().chunk_steps
    window = f", shuffled in windows of {order.window:,}" if order.window else ""
    chunk = _mb(row * order.batch_size * chunk_steps)
    yield (
        f"  reader {reader.name}{window}: {row:,} bytes an example in a batch, "
        f"{_mb(row * order.num_examples)} the whole split, {chunk} a chunk of "
        f"{chunk_steps} batches"
    )


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


# Labels.


def _class_lines(data: Data) -> Iterator[str]:
    """How often each class occurs in both splits, or the range of a label that is a number."""
    counted = [labels_of(pipeline) for pipeline in (data.train, data.evaluation)]
    sizes = [p.num_examples for p in (data.train, data.evaluation)]
    for kind, labels, size in zip(("training", "evaluation"), counted, sizes, strict=True):
        if len(labels) < size:
            yield f"counted in {len(labels):,} of the {size:,} {kind} examples:"
    if data.spec.num_classes is None:
        for kind, labels in zip(("training", "evaluation"), counted, strict=True):
            if labels.size:
                low, mean, high = labels.min(), labels.mean(), labels.max()
                yield f"{kind} labels: {low:.6g} .. {high:.6g}, mean {mean:.6g}"
        return
    counts = [np.bincount(labels, minlength=data.spec.num_classes) for labels in counted]
    names = [class_name(data.spec, number) for number in range(data.spec.num_classes)]
    width = max(len("class"), *map(len, names))
    yield f"{'class':{width}}  {'training':>10}  {'evaluation':>10}"
    for name, train, evaluation in list(zip(names, *counts, strict=True))[:_MAX_CLASSES]:
        yield f"{name:{width}}  {train:10,}  {evaluation:10,}"
    if len(names) > _MAX_CLASSES:
        rest = [count[_MAX_CLASSES:] for count in counts]
        yield (
            f"and {len(names) - _MAX_CLASSES} more classes: {rest[0].min():,} to "
            f"{rest[0].max():,} training examples each, {rest[1].min():,} to {rest[1].max():,}"
        )


def labels_of(pipeline: Pipeline) -> np.ndarray:
    """Labels of a split, or of examples at even distances where it would have to be read.

    Returns:
      [n, ...] in the order of positions, those of unusable records left out.
    """
    size, found = pipeline.num_examples, []
    on_disk = pipeline.reader.read_calls > 0
    count = min(size, _MAX_RECORDS_READ) if on_disk else size
    positions = np.linspace(0, size - 1, count).astype(np.int64)
    for start in range(0, count, _LABELS_READ_AT_ONCE):
        some = tf.constant(positions[start : start + _LABELS_READ_AT_ONCE])
        found.append(_labels_at(pipeline, some))
    return np.concatenate(found)


def _labels_at(pipeline: Pipeline, positions: tf.Tensor) -> np.ndarray:
    spec, raw = pipeline.spec, pipeline.reader.read(positions)
    if "record" not in raw:
        return raw[spec.label_key].numpy()
    kind = tf.as_dtype(pipeline.reader.types[spec.label_key].dtype)
    stored = tf.float32 if kind.is_floating else tf.int64
    missing = stored.min if stored == tf.int64 else np.nan
    spec_of_label = tf.io.FixedLenFeature(
        spec.label_shape, stored, np.full(spec.label_shape, missing)
    )
    labels = tf.io.parse_example(raw["record"], {spec.label_key: spec_of_label})
    labels = labels[spec.label_key].numpy()
    usable = ~np.isnan(labels) if kind.is_floating else labels != missing
    return labels[usable.reshape(len(labels), -1).all(1)]


def class_name(spec: Spec, number: int) -> str:
    """The name of a class, its number if it has none."""
    return spec.class_names[number] if spec.class_names else str(number)


def label_text(spec: Spec, label: np.ndarray) -> str:
    """One row's label for people: a name, a mix of two names, or numbers."""
    if spec.num_classes is None:
        return _numbers(label)
    if label.ndim == 0:
        return class_name(spec, int(label))
    present = [i for i in np.argsort(-label) if label[i] > 0.005]
    if len(present) == 1:
        return class_name(spec, present[0])
    return "\n".join(f"{label[i]:.2f} {class_name(spec, i)}" for i in present[:2])


# In rows.


def table(spec: Spec, shown: Shown) -> Iterator[str]:
    """Lines of a table of the rows shown."""
    labels = [label_text(spec, label).replace("\n", " + ") for label in shown.labels]
    width = max(len(spec.label_key), *map(len, labels))
    yield f"{'index':>9}  {spec.label_key:{width}}  {spec.input_key} (float32)"
    for index, label, inputs in zip(shown.index, labels, shown.inputs, strict=True):
        yield f"{index:9,}  {label:{width}}  {_numbers(inputs)}"


def _numbers(values: np.ndarray) -> str:
    flat = np.ravel(values)
    more = f" ... ({flat.size})" if flat.size > _MAX_NUMBERS else ""
    return " ".join(f"{value:.4g}" for value in flat[:_MAX_NUMBERS]) + more


# In pictures.


def draw_sheet(spec: Spec, shown: Shown, title: str, path: str) -> None:
    """Writes a PNG of the images shown, labels and positions under them, their range on top."""
    count = len(shown.inputs)
    columns = min(_COLUMNS, count)
    rows = -(-count // columns)
    height, width = spec.input_shape[:2]
    cell = _CELL_INCHES * height / width + 0.42
    figure = plots.new_figure(max(6.5, columns * _CELL_INCHES), rows * cell + 0.7)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid:
        axes.axis("off")
    for axes, image, label, index, weight in zip(
        grid, shown.inputs, shown.labels, shown.index, shown.weight, strict=False
    ):
        picture = image[..., 0] if image.shape[-1] == 1 else image
        axes.imshow(np.clip(picture, 0, 1), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        name = "\n".join(line[:_LABEL_CHARS] for line in label_text(spec, label).splitlines())
        where = f"#{index}" if weight > 0 else "weight 0"
        # A dollar sign would begin a formula.
        text = f"{name}\n{where}".replace("$", r"\$")
        axes.text(0.5, -0.03, text, transform=axes.transAxes, ha="center", va="top", fontsize=7)
    figure.suptitle(f"{title}\n{_range_words(shown)}", fontsize=9)
    figure.savefig(path, dpi=130)


def _range_words(shown: Shown) -> str:
    """What a faulty normalisation would show in."""
    images = shown.inputs
    means = ", ".join(f"{mean:.3f}" for mean in images.mean(axis=(0, 1, 2)))
    words = f"{images.dtype} {images.min():.3f} .. {images.max():.3f}, mean by channel {means}"
    if shown.num_outside:
        words += f"; {shown.num_outside:,} NUMBERS OUTSIDE [0, 1], drawn cut off"
    return words
