"""Augmentations: pure functions of (examples, one seed per example).

To add one, write `name(images, seeds) -> images` here or in `policies` and list it in `_IMAGE_FNS`.
All draws come from `uniform`, so an example's augmentation depends on (seed, epoch, position) and
nothing else.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from pipelines import images as images_lib
from pipelines import policies
from pipelines.errors import UserError
from pipelines.features import Spec
from pipelines.mix import MIXES
from pipelines.randomness import salted, uniform
from pipelines.symbols import is_symbol, load_symbol, symbol_name

Examples = dict[str, tf.Tensor]
AugmentFn = Callable[[Examples, tf.Tensor], Examples]

RANDOM_CROP, CENTER = "rrc", "center"  # which part of an image is shown: settled when decoding
_ELSEWHERE = (*MIXES, RANDOM_CROP, CENTER)

_CROP_PADDING_SHARE = 8  # pad by 1/8 of the side, as in the usual 4 pixels for 32
_CUTOUT_SHARE = 2  # of the side; DeVries and Taylor 2017 cut 16 of 32 pixels


def check_names(names: Sequence[str], spec: Spec, varying: bool) -> None:
    """Checks --augment before data is read.

    Args:
      names: its entries.
      spec: the data's spec.
      varying: whether images vary in size.

    Raises:
      UserError: for an unknown name, or an image augmentation on something else.
    """
    for name in names:
        if is_symbol(name):
            load_symbol("augment", name)
            continue
        known = sorted({*_IMAGE_FNS, *MIXES, RANDOM_CROP, CENTER})
        if name not in known:
            raise UserError(
                f"--augment={name}: unknown augmentation; choose from {', '.join(known)} "
                "or give module:function"
            )
        if not spec.is_image:
            raise UserError(
                f"--augment={name}: works on images, but {spec.input_key!r}, of shape "
                f"{spec.input_shape}, is no TFDS Image"
            )
        if name in _NEED_WHOLE_RANGE and not tf.as_dtype(spec.input_dtype).is_integer:
            raise UserError(f"--augment={name}: works on integer pixels, not {spec.input_dtype}")
        if name == CENTER and not varying:
            raise UserError(f"--augment={CENTER}: images of one size are shown whole; leave it out")
    if RANDOM_CROP in names and CENTER in names:
        raise UserError(f"--augment: {RANDOM_CROP} and {CENTER} exclude each other")


def flip_salt(names: Sequence[str]) -> int | None:
    """The salt of a flip that comes right after decoding, which may then do it, or None."""
    first = next((i for i, name in enumerate(names) if name not in _ELSEWHERE), None)
    return first if first is not None and names[first] == "flip" else None


def make_augment_fn(
    names: Sequence[str], spec: Spec, crops: bool, flips: bool = True
) -> AugmentFn | None:
    """Composes augmentations, in the order given.

    Args:
      names: entries of --augment, checked; those of `mix` and of decoding are left to others.
      spec: the data's spec.
      crops: whether random-resized-crop is among them here, and not in decoding; it comes first.
      flips: whether a flip that comes right after decoding happens here.

    Returns:
      A function of (examples as tensors [m, ...], int32 seeds [m, 2]) that returns examples of the
      types of `spec`, or None if there is nothing to do.
    """
    fns = [_random_crop(spec)] if crops else []
    flipped = None if flips else flip_salt(names)
    fns += [
        _make(name, spec, place)
        for place, name in enumerate(names)
        if name not in _ELSEWHERE and place != flipped
    ]
    if not fns:
        return None

    def augment(examples: Examples, seeds: tf.Tensor) -> Examples:
        for fn in fns:
            examples = fn(examples, seeds)
        return examples

    return augment


def check_calls(names: Sequence[str], types: dict[str, tf.TensorSpec]) -> None:
    """Traces users' augmentations on an example of `types`, so that mistakes show before training.

    Raises:
      UserError: for what the user's code raises or returns.
    """
    example = {key: tf.zeros(t.shape, t.dtype) for key, t in types.items()}
    for name in filter(is_symbol, names):
        tf.data.Dataset.from_tensors((example, tf.zeros([2], tf.int32))).map(_one_example(name))


def _make(name: str, spec: Spec, salt: int) -> AugmentFn:
    if is_symbol(name):
        return _per_example(name)

    def augment(examples: Examples, seeds: tf.Tensor) -> Examples:
        images = _IMAGE_FNS[name](examples[spec.input_key], salted(seeds, salt))
        return {**examples, spec.input_key: images}

    return augment


def _random_crop(spec: Spec) -> AugmentFn:
    def augment(examples: Examples, seeds: tf.Tensor) -> Examples:
        images, key = examples[spec.input_key], spec.input_key
        shapes = tf.broadcast_to(tf.shape(images)[1:3], [images.shape[0], 2])
        rows = (images, images_lib.random_windows(shapes, seeds))
        shown = tf.TensorSpec(spec.input_shape, images.dtype)
        cropped = tf.map_fn(
            lambda row: images_lib.resize(images_lib.cut(*row), shown),
            rows,
            fn_output_signature=shown,
            parallel_iterations=1,
        )
        return {**examples, key: cropped}

    return augment


def _per_example(name: str) -> AugmentFn:
    """Lifts a user's function of one example and one seed to a batch of them."""
    one = _one_example(name)

    def augment(examples: Examples, seeds: tf.Tensor) -> Examples:
        types = {key: tf.TensorSpec(t.shape[1:], t.dtype) for key, t in examples.items()}
        return tf.map_fn(lambda row: one(*row), (examples, seeds), fn_output_signature=types)

    return augment


def _one_example(name: str) -> Callable:
    """A user's function, its Python control flow turned into TensorFlow's and its faults told."""
    fn = load_symbol("augment", name)
    try:
        fn = tf.autograph.to_graph(fn)
    except Exception:  # whatever it is, such as a lambda: then it has to do as it is
        pass

    @tf.autograph.experimental.do_not_convert
    def one(example: Examples, seed: tf.Tensor) -> Examples:
        try:
            result = fn(dict(example), seed)
        except Exception as error:  # a user's code: whatever it raises
            reason = str(error).strip().splitlines()[-1:]  # the rest says where, in many lines
            raise UserError(
                f"--augment={symbol_name(name)}: {type(error).__name__}: {' '.join(reason)}"
            ) from error
        if not isinstance(result, dict) or set(result) != set(example):
            raise UserError(
                f"--augment={symbol_name(name)}: must return the example with its entries "
                f"{sorted(example)}"
            )
        return {key: _like(name, key, value, example[key]) for key, value in result.items()}

    return one


def _like(name: str, key: str, value: tf.Tensor, stored: tf.Tensor) -> tf.Tensor:
    """An entry of a user's result, with the type and shape that all examples must share."""
    value = tf.convert_to_tensor(value)
    if value.dtype != stored.dtype or not stored.shape.is_compatible_with(value.shape):
        raise UserError(
            f"--augment={symbol_name(name)}: returns {key!r} as {value.dtype.name} {value.shape} "
            f"where the dataset yields {stored.dtype.name} {stored.shape}"
        )
    return tf.ensure_shape(value, stored.shape)  # tf.numpy_function forgets it


def flip(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Mirrors each image left to right with probability 1/2.

    Args:
      images: [m, height, width, channels], any dtype.
      seeds: int32 [m, 2].
    """
    mirrored = tf.cast(images_lib.flips(seeds), tf.int32)
    return by_group(images, mirrored, [lambda part: part, _mirrored])


def _mirrored(images: tf.Tensor) -> tf.Tensor:
    # With these shapes TensorFlow takes a path several times as fast as for [m, h, w, c].
    _, height, width, channels = images.shape
    rows = tf.reshape(images, [-1, width] if channels == 1 else [-1, width, channels])
    return tf.reshape(tf.reverse(rows, [1]), [-1, height, width, channels])


def crop(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Pads by an eighth of the side with zeros and cuts the original size at a random place.

    Args:
      images: [m, height, width, channels], any dtype.
      seeds: int32 [m, 2].
    """
    count, height, width, channels = images.shape
    down, right = (
        (pad, tf.cast(tf.floor(uniform(seeds, draw) * (2 * pad + 1)), tf.int32))
        for draw, pad in (
            (1, max(1, height // _CROP_PADDING_SHARE)),
            (2, max(1, width // _CROP_PADDING_SHARE)),
        )
    )
    rows = tf.reshape(images, [count * height, width * channels])
    rows = tf.pad(
        rows, [[0, 1], [right[0] * channels] * 2]
    )  # the last row stands for those outside
    numbers = down[1][:, None] - down[0] + tf.range(height)
    inside = (numbers >= 0) & (numbers < height)
    numbers = tf.where(inside, numbers + tf.range(count)[:, None] * height, count * height)
    # Whole rows are copied, by a shift known when the graph is built: ten times as fast as looking
    # up each pixel.
    shifts = [
        lambda part, x=x * channels: part[:, :, x : x + width * channels]
        for x in range(2 * right[0] + 1)
    ]
    return tf.reshape(by_group(tf.gather(rows, numbers), right[1], shifts), images.shape)


def by_group(rows: tf.Tensor, groups: tf.Tensor, fns: Sequence[Callable]) -> tf.Tensor:
    """Applies `fns[groups[i]]` to row i: each function once, to all the rows of its group."""
    parts = tf.dynamic_partition(rows, groups, len(fns))
    places = tf.dynamic_partition(tf.range(rows.shape[0]), groups, len(fns))
    results = [fn(part) for fn, part in zip(fns, parts, strict=True)]
    joined = tf.dynamic_stitch(places, results)
    return tf.ensure_shape(joined, [rows.shape[0], *results[0].shape[1:]])


def cutout(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Blanks a square of half the side around a random pixel (DeVries and Taylor 2017).

    Args:
      images: [m, height, width, channels], any dtype.
      seeds: int32 [m, 2].
    """
    inside = None
    for draw, axis in ((0, 1), (1, 2)):
        side = images.shape[axis]
        center = tf.floor(uniform(seeds, draw) * side)[:, None]
        distance = tf.range(side, dtype=tf.float32) - center
        near = (distance >= -(side // _CUTOUT_SHARE) / 2) & (distance < side // _CUTOUT_SHARE / 2)
        near = near[:, :, None] if axis == 1 else near[:, None, :]
        inside = near if inside is None else inside & near
    return tf.where(inside[..., None], tf.zeros([], images.dtype), images)


_IMAGE_FNS = {
    "color": policies.color,
    "crop": crop,
    "cutout": cutout,
    "flip": flip,
    "randaug": policies.randaug,
}
_NEED_WHOLE_RANGE = ("color", "randaug")
