"""Raw records to examples: parses what TFDS serialized, many at once, and decodes images."""

from collections.abc import Callable

import tensorflow as tf
import tensorflow_datasets as tfds

from pipelines import images
from pipelines.bad_records import Examples, guarded
from pipelines.features import Spec

SHAPE = "_shape"  # int32 [m, 2] of parsed examples: height and width of the image still encoded


class Decoder:
    """Decodes the records of one dataset.

    Attributes:
      types: types of one decoded example.
      view: how images are shown; None for those that come as stored, or other input.
      input_key: the feature that is fed to the model.
    """

    def __init__(self, features: dict, info: tfds.core.DatasetInfo, spec: Spec, view, bad):
        """Makes a decoder.

        Args:
          features: feature key -> TFDS feature of those wanted.
          info: the dataset's, for how its features are serialized.
          spec: says what a decoded input is like and which labels there are.
          view: `images.View` of images that vary in size, else None.
          bad: `BadRecords` to note those in which cannot be decoded.
        """
        self._features, self._bad, self._spec = features, bad, spec
        self._serialized = info.features.get_serialized_info()
        self.view, self.input_key = view, spec.input_key
        self.types = {key: tf.TensorSpec(f.shape, f.tf_dtype) for key, f in features.items()}
        self._stored_input = self.types[spec.input_key]
        self.types[spec.input_key] = tf.TensorSpec(spec.input_shape, spec.input_dtype)
        self._is_image = isinstance(features[spec.input_key], tfds.features.Image)

    @property
    def parsed_types(self) -> dict[str, tf.TensorSpec]:
        """Types of one example of `parse`."""
        types = dict(self.types)
        if self._is_image:
            types[self.input_key] = tf.TensorSpec([], tf.string)
        if self.view:
            types[SHAPE] = tf.TensorSpec([2], tf.int32)
        return types

    def decode(
        self, records: tf.Tensor, positions: tf.Tensor, seeds: tf.Tensor, rescue: bool
    ) -> Examples:
        """Examples [m, ...] of records (string [m]); graph code.

        One that cannot be decoded fails all or, with `rescue`, is noted as bad.
        """

        def decode(records, seeds):
            return self._with_pixels(self._parse(records), seeds)

        return self._noting(decode, (records, seeds), self.types, positions, rescue)

    def parse(self, records: tf.Tensor, positions: tf.Tensor, rescue: bool) -> Examples:
        """The same with images still encoded; where they vary in size, `SHAPE` says in which."""
        return self._noting(self._parse, (records,), self.parsed_types, positions, rescue)

    def finish(
        self, parsed: Examples, positions: tf.Tensor, seeds: tf.Tensor, rescue: bool
    ) -> Examples:
        """Decodes the images of what `parse` returned."""
        keys = [self.input_key, SHAPE] if self.view else [self.input_key]

        def decode(seeds, *values):
            return self._with_pixels(dict(zip(keys, values, strict=True)), seeds)

        types = {self.input_key: self.types[self.input_key]}
        pixels = self._noting(decode, (seeds, *map(parsed.get, keys)), types, positions, rescue)
        return {**{key: t for key, t in parsed.items() if key not in keys}, **pixels}

    def _noting(self, fn: Callable, inputs, types, positions: tf.Tensor, rescue: bool) -> Examples:
        if rescue:
            examples, failed = guarded(fn, inputs, types)
            examples = self._bad.settle(examples, failed, positions, "it cannot be decoded")
        else:
            examples = fn(*inputs)
        if self._spec.label_key not in types:
            return examples
        labels = examples[self._spec.label_key]
        wrong, reason = self._wrong_labels(labels)
        examples = self._bad.settle(examples, wrong, positions, reason, labels)
        inputs = examples[self.input_key]
        if not inputs.dtype.is_floating:
            return examples
        reason = f"its input {self.input_key!r} holds numbers that are not finite"
        return self._bad.settle(examples, _any(~tf.math.is_finite(inputs)), positions, reason)

    def _wrong_labels(self, labels: tf.Tensor) -> tuple[tf.Tensor, str]:
        """Labels that no model output stands for; a GPU would train on them to NaN."""
        key, num_classes = self._spec.label_key, self._spec.num_classes
        if num_classes:
            wrong = (labels < 0) | (labels >= num_classes)
            reason = f"its label {key!r} is {{}}, outside 0..{num_classes - 1}"
        elif labels.dtype.is_floating:
            wrong, reason = ~tf.math.is_finite(labels), f"its label {key!r} is {{}}, not finite"
        else:
            wrong, reason = tf.zeros_like(labels, tf.bool), ""
        return _any(wrong), reason

    def _parse(self, records: tf.Tensor) -> Examples:
        """Parses serialized tf.train.Examples; what TFDS encodes beside images is decoded."""
        specs = {key: _example_spec(self._serialized[key]) for key in self._features}
        parsed = tf.io.parse_example(records, specs)
        for key, feature in self._features.items():
            info, values = self._serialized[key], parsed[key]
            if info.tf_dtype != tf.string:
                values = tf.cast(values, info.tf_dtype)
            elif not (key == self.input_key and self._is_image):
                values = _map_rows(feature.decode_example, values, self.types[key])
            parsed[key] = values
        if self._is_image:
            parsed[self.input_key] = images.refuse_huge(parsed[self.input_key])
        if self.view:
            shapes = images.shapes_of(parsed[self.input_key])
            parsed[SHAPE] = images.within_limit(shapes, shapes)
        return parsed

    def _with_pixels(self, parsed: Examples, seeds: tf.Tensor) -> Examples:
        if not self._is_image:
            return parsed
        feature, image = self._features[self.input_key], self.types[self.input_key]
        encoded = parsed.pop(self.input_key)
        if self.view:
            windows = self.view.windows(parsed.pop(SHAPE), seeds)
            mirrored = self.view.mirrored(seeds)
            pixels = images.decode_windows(encoded, windows, mirrored, image)
        elif image.shape == self._stored_input.shape:
            pixels = _map_rows(feature.decode_example, encoded, image)
        else:
            pixels = _map_rows(
                lambda data: images.resize(feature.decode_example(data), image), encoded, image
            )
        return {**parsed, self.input_key: pixels}


def _any(wrong: tf.Tensor) -> tf.Tensor:
    """bool [m]: whether any value of a row [m, ...] is true."""
    return tf.reduce_any(tf.reshape(wrong, [wrong.shape[0], -1]), axis=1)


def _map_rows(fn: Callable, rows: tf.Tensor, row_type: tf.TensorSpec) -> tf.Tensor:
    return tf.map_fn(fn, rows, fn_output_signature=row_type, parallel_iterations=1)


def _example_spec(info) -> tf.io.FixedLenFeature:
    """tf.train.Example holds integers as int64, floats as float32, the rest as bytes."""
    if info.tf_dtype.is_integer or info.tf_dtype.is_bool:
        return tf.io.FixedLenFeature(info.shape, tf.int64)
    if info.tf_dtype.is_floating:
        return tf.io.FixedLenFeature(info.shape, tf.float32)
    return tf.io.FixedLenFeature(info.shape, tf.string)
