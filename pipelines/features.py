"""From a TFDS feature dictionary to the spec a model is built from."""

import dataclasses
import logging
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from pipelines.errors import UserError

_log = logging.getLogger(__name__)

_DEFAULT_IMAGE_SIZE = 224  # of ImageNet models


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a model must accept and return.

    Attributes:
      input_key: the batch's entry that is fed to the model.
      input_shape: shape of one input.
      input_dtype: dtype name as the pipeline yields it; models receive `to_model_input` of it.
      label_key: the batch's entry to predict.
      label_shape: shape of one label.
      num_classes: classes of an integer label, None for any other.
      class_names: names of the classes, None if the dataset gives none.
      output_shape: shape of one output: (num_classes,) logits, or the label's shape.
      is_image: whether the input is an image [height, width, channels].
      feature_keys: every entry of a batch that comes from the dataset.
      stored_shape: shape of one input as the dataset stores it: an image's height and width are
        None where they vary.
    """

    input_key: str
    input_shape: tuple[int, ...]
    input_dtype: str
    label_key: str
    label_shape: tuple[int, ...]
    num_classes: int | None
    class_names: tuple[str, ...] | None
    output_shape: tuple[int, ...]
    is_image: bool
    feature_keys: tuple[str, ...]
    stored_shape: tuple[int | None, ...]

    @property
    def varies_in_size(self) -> bool:
        """Whether inputs are images whose height and width are each image's own."""
        return None in self.stored_shape

    def with_classes(self, num_classes: int | None) -> "Spec":
        """The same data with an integer label as one of `num_classes` classes."""
        if not num_classes:
            return self
        return dataclasses.replace(self, num_classes=num_classes, output_shape=(num_classes,))

    def for_regression(self) -> "Spec":
        """The same data with the label as a number to predict."""
        return dataclasses.replace(
            self, num_classes=None, class_names=None, output_shape=self.label_shape
        )


def to_model_input(inputs: tf.Tensor) -> tf.Tensor:
    """Casts and scales on the device: uint8/255 and uint16/65535 to [0, 1], the rest unscaled.

    Args:
      inputs: numeric tensor of any shape.

    Returns:
      float32 tensor of the same shape.
    """
    scale = {tf.uint8: 1.0 / 255.0, tf.uint16: 1.0 / 65535.0}.get(inputs.dtype)
    outputs = tf.cast(inputs, tf.float32)
    return outputs if scale is None else outputs * scale


def choose_keys(info: tfds.core.DatasetInfo, input_key: str | None, label_key: str | None):
    """Decides which features are input and label.

    Returns:
      (input_key, label_key).

    Raises:
      UserError: if a named feature does not exist or nothing can be inferred.
    """
    features, name = _feature_dict(info), info.name
    for flag, key in (("input_key", input_key), ("label_key", label_key)):
        if key and key not in features:
            raise UserError(f"--{flag}={key}: {name} has the features {_describe(features)}")
    supervised = info.supervised_keys
    if supervised and all(isinstance(key, str) for key in supervised):
        input_key, label_key = input_key or supervised[0], label_key or supervised[1]
    label_key = label_key or _only(
        [
            k
            for k, f in features.items()
            if k != input_key and isinstance(f, tfds.features.ClassLabel)
        ]
    )
    label_key = label_key or ("label" if "label" in features else None)
    candidates = [k for k in features if k != label_key and _refusal(features[k]) is None]
    images = [k for k in candidates if isinstance(features[k], tfds.features.Image)]
    input_key = input_key or _only(images) or _only(candidates)
    if not input_key or not label_key:
        missing = "--input_key" if not input_key else "--label_key"
        raise UserError(
            f"{name} names no supervised keys and they cannot be inferred: give {missing}; "
            f"it offers {_describe(features)}"
        )
    if input_key == label_key:
        raise UserError(f"--input_key and --label_key are both {input_key!r}")
    return input_key, label_key


def usable_features(info: tfds.core.DatasetInfo, input_key: str, label_key: str) -> dict[str, Any]:
    """The features that travel in a batch: input, label, and every other fixed-shape number.

    Raises:
      UserError: if input or label is of a kind that cannot be batched.
    """
    features = _feature_dict(info)
    for key in (input_key, label_key):
        reason = _refusal(features[key])
        if reason:
            raise UserError(
                f"feature {key!r} of {info.name} is {reason}, which is not supported: it offers "
                f"{_describe(features)}"
            )
    extra = {
        key: feature
        for key, feature in features.items()
        if _refusal(feature) is None and not isinstance(feature, tfds.features.Image)
    }
    return {input_key: features[input_key], **extra, label_key: features[label_key]}


def make_spec(
    info, input_key: str, label_key: str, features: dict[str, Any], image_size: int | None
) -> Spec:
    """Describes the data; the classes of a plain integer label are filled in once it is read.

    Raises:
      UserError: for an image size of what is no image.
    """
    source, target = features[input_key], features[label_key]
    is_image = isinstance(source, tfds.features.Image)
    if image_size and not is_image:
        raise UserError(
            f"--image_size: {input_key!r} of {info.name} is no image but {_describe_one(source)}"
        )
    stored_shape = tuple(source.shape)
    if None in stored_shape and not image_size:
        image_size = _DEFAULT_IMAGE_SIZE
        _log.info("images vary in size: shown at %d pixels (--image_size)", image_size)
    shape = (image_size, image_size, stored_shape[-1]) if image_size else stored_shape
    is_class = isinstance(target, tfds.features.ClassLabel)
    named = is_class and target.num_classes is not None and target.names is not None
    num_classes = target.num_classes if is_class else None
    label_shape = tuple(target.shape)
    return Spec(
        input_key=input_key,
        input_shape=shape,
        input_dtype=tf.as_dtype(source.np_dtype).name,
        label_key=label_key,
        label_shape=label_shape,
        num_classes=num_classes,
        class_names=tuple(target.names) if named else None,
        output_shape=(num_classes,) if num_classes else label_shape,
        is_image=is_image,
        feature_keys=tuple(features),
        stored_shape=stored_shape,
    )


def is_integer_label(feature: Any) -> bool:
    """Whether a label without classes may still be one: an integer scalar."""
    return tuple(feature.shape) == () and np.issubdtype(feature.np_dtype, np.integer)


def _feature_dict(info: tfds.core.DatasetInfo) -> dict[str, Any]:
    if not isinstance(info.features, tfds.features.FeaturesDict):
        raise UserError(f"{info.name} yields {info.features}, not a dictionary of features")
    return dict(info.features.items())


def _refusal(feature: Any) -> str | None:
    """Why a feature cannot be batched as it is, or None."""
    if isinstance(feature, tfds.features.Text) or feature.np_dtype in (str, object, np.str_):
        return "text"
    if isinstance(feature, (tfds.features.Audio, tfds.features.Video)):
        return type(feature).__name__.lower()
    if isinstance(feature, (tfds.features.FeaturesDict, tfds.features.Dataset)):
        return "nested"
    shape = feature.shape
    is_image = isinstance(feature, tfds.features.Image)
    if not isinstance(shape, tuple) or any(s is None for s in (shape[2:] if is_image else shape)):
        return f"of varying shape {shape}"
    if is_image and shape[-1] not in (1, 3):
        return f"an image of {shape[-1]} channels"
    if isinstance(feature.np_dtype, dict):
        return "structured"
    if np.dtype(feature.np_dtype).kind not in "biuf":
        return f"of type {feature.np_dtype}"
    return None


def _only(keys: list[str]) -> str | None:
    return keys[0] if len(keys) == 1 else None


def _describe(features: dict[str, Any]) -> str:
    return ", ".join(f"{k} ({_describe_one(f)})" for k, f in features.items())


def _describe_one(feature: Any) -> str:
    return f"{type(feature).__name__} {getattr(feature, 'shape', None)}"
