"""Augmentations: pure functions of (examples, one seed per example).

To add one, write `name(images, seeds) -> images` below and list it in `_IMAGE_FNS`. All draws come
from `_uniform`, so an example's augmentation depends on (seed, epoch, position) and nothing else.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from pipelines.errors import UserError
from pipelines.features import Spec
from pipelines.order import hash64
from pipelines.symbols import is_symbol, load_symbol

Examples = dict[str, tf.Tensor]
AugmentFn = Callable[[Examples, tf.Tensor], Examples]

_CROP_PADDING_SHARE = 8  # pad by 1/8 of the side, as in the usual 4 pixels for 32


def make_augment_fn(names: Sequence[str], spec: Spec) -> AugmentFn | None:
    """Composes augmentations, in the order given.

    Args:
      names: entries of --augment.
      spec: the data's spec.

    Returns:
      A function of (examples as tensors [m, ...], int32 seeds [m, 2]) that returns examples of the
      same shapes and dtypes, or None if there is nothing to do.

    Raises:
      UserError: for an unknown name, or an image augmentation on something else.
    """
    fns = [_augment_fn(name, spec, salt) for salt, name in enumerate(names)]
    if not fns:
        return None

    def augment(examples: Examples, seeds: tf.Tensor) -> Examples:
        for fn in fns:
            examples = fn(examples, seeds)
        return examples

    return augment


def _augment_fn(name: str, spec: Spec, salt: int) -> AugmentFn:
    if is_symbol(name):
        return _per_example(name, load_symbol("augment", name))
    if name not in _IMAGE_FNS:
        raise UserError(
            f"--augment={name}: unknown augmentation; choose from {', '.join(sorted(_IMAGE_FNS))} "
            "or give module:function"
        )
    if not spec.is_image:
        raise UserError(
            f"--augment={name}: works on images, but {spec.input_key!r} has shape {spec.input_shape}"
        )

    def augment(examples: Examples, seeds: tf.Tensor) -> Examples:
        images = _IMAGE_FNS[name](examples[spec.input_key], _salted(seeds, salt))
        return {**examples, spec.input_key: images}

    return augment


def _per_example(name: str, fn: Callable) -> AugmentFn:
    """Lifts a user's function of one example and one seed to a batch of them."""

    def one(example_and_seed):
        example, seed = example_and_seed
        result = fn(dict(example), seed)
        if not isinstance(result, dict) or set(result) != set(example):
            raise UserError(
                f"--augment={name}: must return the example with its entries {sorted(example)}"
            )
        # tf.numpy_function forgets shapes, and a map needs the same types for every example.
        return {
            key: tf.ensure_shape(tf.cast(value, example[key].dtype), example[key].shape)
            for key, value in result.items()
        }

    def augment(examples: Examples, seeds: tf.Tensor) -> Examples:
        types = {key: tf.TensorSpec(t.shape[1:], t.dtype) for key, t in examples.items()}
        return tf.map_fn(one, (examples, seeds), fn_output_signature=types)

    return augment


def flip(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Mirrors each image left to right with probability 1/2.

    Args:
      images: [m, height, width, channels], any dtype.
      seeds: int32 [m, 2].
    """
    mirrored = _uniform(seeds, 0)[:, None, None, None] < 0.5
    return tf.where(mirrored, tf.reverse(images, axis=[2]), images)


def crop(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Pads by an eighth of the side with zeros and cuts the original size at a random place.

    Args:
      images: [m, height, width, channels], any dtype.
      seeds: int32 [m, 2].
    """
    for axis in (1, 2):
        images = _shift(images, axis, _uniform(seeds, axis))
    return images


def _shift(images: tf.Tensor, axis: int, draws: tf.Tensor) -> tf.Tensor:
    """Moves each image along one axis by a whole number of pixels, filling with zeros."""
    side = images.shape[axis]
    pad = max(1, side // _CROP_PADDING_SHARE)
    offsets = tf.cast(tf.floor(draws * (2 * pad + 1)), tf.int32)
    padded = tf.pad(images, [[pad, pad] if a == axis else [0, 0] for a in range(4)])
    return tf.gather(padded, offsets[:, None] + tf.range(side), axis=axis, batch_dims=1)


def _uniform(seeds: tf.Tensor, draw: int) -> tf.Tensor:
    """float32 [m] in [0, 1): draw number `draw` of each example's seed."""
    bits = hash64(tf.bitcast(seeds, tf.uint64) + tf.constant((draw + 1) << 32, tf.uint64))
    return tf.cast(tf.bitwise.right_shift(bits, tf.constant(40, tf.uint64)), tf.float32) / 2.0**24


def _salted(seeds: tf.Tensor, salt: int) -> tf.Tensor:
    """Seeds of the augmentation at place `salt` of the list, so that two do not draw alike."""
    return tf.bitcast(hash64(tf.bitcast(seeds, tf.uint64) + tf.constant(salt, tf.uint64)), tf.int32)


_IMAGE_FNS = {"crop": crop, "flip": flip}
