"""Encoded images to pixels of one size: only what is shown is decoded, at no more than its detail.

An image of any size is shown through a window (y, x, height, width, in its own pixels) that is
resized to the view's size. A JPEG is decoded within the window alone and, where the window has
several times the view's pixels, at 1/2, 1/4 or 1/8 of its size, which the format gives nearly for
free. Pixels that were decoded whole come out the same to the last bit (`decode_levels`), so what is
held in memory does not change what a model sees.
"""

import dataclasses
import math

import tensorflow as tf

from pipelines.features import Spec
from pipelines.randomness import salted, uniform

REDUCTIONS = (1, 2, 4, 8)
# Plain upsampling of the colours, unlike the fancy one, does not look beyond a window's edge.
_JPEG = {"dct_method": "INTEGER_FAST", "fancy_upscaling": False}
_CENTER_SHARE = 0.875  # of the shorter side: the customary 224 of 256 pixels
_CROP_AREA = (0.08, 1.0)  # share of the image, as in Szegedy et al. 2014
_CROP_ASPECT = (3 / 4, 4 / 3)
_CROP_ATTEMPTS = 10
_CROP_SALT = 0x9D7C
MAX_PIXELS = 1 << 27  # of one image; what claims more is made to exhaust memory


@dataclasses.dataclass(frozen=True)
class View:
    """How an image is shown.

    Attributes:
      size: (height, width) in pixels.
      random: a window drawn by the example's seed (`random_windows`), or the one in the centre.
      flip_salt: None, or what `augment.flip` would be salted with if it came next: to mirror an
        image while it is in the core's cache costs half as much.
    """

    size: tuple[int, int]
    random: bool
    flip_salt: int | None = None

    def windows(self, shapes: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
        """int32 [m, 4] windows into images of `shapes` (int32 [m, 2]), `seeds` int32 [m, 2]."""
        return random_windows(shapes, seeds) if self.random else center_windows(shapes)

    def mirrored(self, seeds: tf.Tensor) -> tf.Tensor:
        """bool [m]: which images are shown mirrored."""
        if self.flip_salt is None:
            return tf.zeros([seeds.shape[0]], tf.bool)
        return flips(salted(seeds, self.flip_salt))


class EvaluationView:
    """Images from elsewhere as evaluation shows those of a dataset; graph code.

    Those of a dataset whose images vary in size are shown through the window in the centre, others
    whole.
    """

    def __init__(self, spec: Spec):
        """Takes the spec of the dataset's images."""
        self._image = tf.TensorSpec(spec.input_shape, spec.input_dtype)
        self._centers = spec.varies_in_size

    def of_encoded(self, encoded: tf.Tensor) -> tf.Tensor:
        """[m, *input_shape] of encoded images (string [m]) of uint8 or uint16.

        Raises:
          tf.errors.InvalidArgumentError: when run on what is no image, or one of too many pixels.
        """
        encoded, image = refuse_huge(encoded), self._image
        if self._centers:
            shapes = shapes_of(encoded)
            windows = center_windows(within_limit(shapes, shapes))
            return decode_windows(encoded, windows, tf.zeros_like(windows[:, 0], tf.bool), image)

        def whole(data):
            pixels = tf.io.decode_image(data, image.shape[-1], image.dtype, expand_animations=False)
            return resize(pixels, image)

        return tf.map_fn(whole, encoded, fn_output_signature=image)

    def of_pixels(self, pixels: tf.Tensor) -> tf.Tensor:
        """[m, *input_shape] of images [m, height, width, channels] of any one size.

        Images of the model's size, such as a pipeline's batches, are taken as they are. Where sizes
        vary, what was a JPEG looks only nearly as in evaluation, which decodes no more of it than
        it shows.
        """
        image = self._image
        if pixels.shape[1:] == image.shape:
            return pixels
        as_they_are = tf.reduce_all(tf.shape(pixels)[1:3] == image.shape[:2])
        return tf.cond(
            as_they_are,
            lambda: tf.ensure_shape(pixels, [None, *image.shape]),
            lambda: tf.map_fn(self._of_one, pixels, fn_output_signature=image),
        )

    def _of_one(self, pixels: tf.Tensor) -> tf.Tensor:
        if self._centers:
            windows = center_windows(tf.shape(pixels)[None, :2])
            reduction = reductions(windows, self._image.shape[:2])[0]
            pixels = shrink(cut(pixels, windows[0]), reduction)
        return resize(pixels, self._image)


def flips(seeds: tf.Tensor) -> tf.Tensor:
    """bool [m]: true with probability 1/2."""
    return uniform(seeds, 0) < 0.5


def center_windows(shapes: tf.Tensor) -> tf.Tensor:
    """The square in the centre with 7/8 of the shorter side: int32 [m, 4]."""
    sides = tf.cast(tf.reduce_min(shapes, axis=1, keepdims=True), tf.float32) * _CENTER_SHARE
    sides = tf.repeat(tf.maximum(1, tf.cast(tf.round(sides), tf.int32)), 2, axis=1)
    return tf.concat([(shapes - sides) // 2, sides], axis=1)


def random_windows(shapes: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Random area and aspect ratio ("Inception" cropping, Szegedy et al. 2014): int32 [m, 4].

    The first of ten draws that lies within the image counts; if none does, the largest window in
    the centre with an allowed aspect ratio.
    """
    seeds = salted(seeds, _CROP_SALT)
    tries = range(_CROP_ATTEMPTS)
    area = _between(_CROP_AREA, uniform(seeds, *tries))
    log_aspect = _between(
        tuple(map(math.log, _CROP_ASPECT)), uniform(seeds, *(i + _CROP_ATTEMPTS for i in tries))
    )
    height, width = (tf.cast(shapes[:, i, None], tf.float32) for i in (0, 1))
    area *= height * width
    sides = tf.stack([tf.sqrt(area / tf.exp(log_aspect)), tf.sqrt(area * tf.exp(log_aspect))], 2)
    sides = tf.cast(tf.round(sides), tf.int32)  # [m, attempts, 2]
    fits = tf.reduce_all((sides >= 1) & (sides <= shapes[:, None]), axis=2)
    first = tf.argmax(fits, axis=1)
    sides = tf.gather(sides, first, axis=1, batch_dims=1)
    room = tf.cast(shapes - sides + 1, tf.float32)
    places = uniform(seeds, 2 * _CROP_ATTEMPTS, 2 * _CROP_ATTEMPTS + 1)
    corners = tf.cast(tf.floor(places * room), tf.int32)
    drawn = tf.concat([corners, sides], axis=1)
    return tf.where(tf.reduce_any(fits, axis=1, keepdims=True), drawn, _widest(shapes))


def _widest(shapes: tf.Tensor) -> tf.Tensor:
    """The largest centred windows of an allowed aspect ratio."""
    height, width = shapes[:, 0], shapes[:, 1]
    sides = tf.stack(
        [tf.minimum(height, _scaled(width, 4 / 3)), tf.minimum(width, _scaled(height, 4 / 3))], 1
    )
    return tf.concat([(shapes - sides) // 2, sides], axis=1)


def _scaled(lengths: tf.Tensor, factor: float) -> tf.Tensor:
    return tf.cast(tf.round(tf.cast(lengths, tf.float32) * factor), tf.int32)


def _between(bounds: tuple[float, float], draws: tf.Tensor) -> tf.Tensor:
    return bounds[0] + draws * (bounds[1] - bounds[0])


def shapes_of(encoded: tf.Tensor) -> tf.Tensor:
    """int32 [m, 2]: height and width of encoded images (string [m]), from their headers."""

    def shape_of(data):
        def png():  # the first chunk, https://www.w3.org/TR/png/#11IHDR, begins with width, height
            sides = tf.io.decode_raw(tf.strings.substr(data, 16, 8), tf.int32, little_endian=False)
            return tf.reverse(tf.ensure_shape(sides, [2]), [0])

        def jpeg():
            return tf.io.extract_jpeg_shape(data)[:2]

        def other():
            return tf.shape(tf.io.decode_image(data, expand_animations=False))[:2]

        is_png = tf.equal(tf.strings.substr(data, 0, 4), b"\x89PNG")
        return tf.case([(tf.io.is_jpeg(data), jpeg), (is_png, png)], default=other)

    return tf.map_fn(
        shape_of, encoded, fn_output_signature=tf.TensorSpec([2], tf.int32), parallel_iterations=1
    )


def refuse_huge(encoded: tf.Tensor) -> tf.Tensor:
    """Encoded images (string [m]) as they are, once their headers claim no more than `MAX_PIXELS`.

    A few bytes may claim pixels that fill the memory; so this comes before they are decoded. Looks
    at PNG, GIF and BMP; of JPEGs, `shapes_of` knows the size, and the decoder has a limit.

    Raises:
      tf.errors.InvalidArgumentError: when run on one that claims more, or that is no image.
    """

    def sides(position, size, dtype, little_endian):
        field = tf.strings.substr(encoded, position, size)
        values = tf.io.decode_raw(field, dtype, little_endian, fixed_length=size)
        return tf.abs(tf.cast(tf.ensure_shape(values, [None, 2]), tf.int64))

    def begins(magic):
        return tf.equal(tf.strings.substr(encoded, 0, len(magic)), magic)[:, None]

    # PNG's first chunk, GIF's logical screen, BMP's information header, whose height may be
    # negative.
    claimed = tf.where(begins(b"\x89PNG"), sides(16, 8, tf.int32, False), 1)
    claimed = tf.where(begins(b"GIF8"), sides(6, 4, tf.uint16, True), claimed)
    claimed = tf.where(begins(b"BM"), sides(18, 8, tf.int32, True), claimed)
    return within_limit(encoded, claimed)


def within_limit(values: tf.Tensor, shapes: tf.Tensor) -> tf.Tensor:
    """`values`, once no image of `shapes` (integers [m, 2]) has more than `MAX_PIXELS`."""
    pixels = tf.reduce_prod(tf.cast(shapes, tf.int64), axis=1)
    possible = tf.reduce_all((pixels >= 0) & (pixels <= MAX_PIXELS))
    with tf.control_dependencies([tf.debugging.Assert(possible, ["an image of too many pixels"])]):
        return tf.identity(values)


def reductions(windows: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    """int32 [m]: the largest of 1, 2, 4, 8 by which windows shrink without falling below `size`."""
    spare = tf.reduce_min(windows[:, 2:] // tf.constant(tuple(size), tf.int32), axis=1)
    return tf.reduce_max(
        tf.where(spare[:, None] >= REDUCTIONS, REDUCTIONS, tf.ones_like(REDUCTIONS)), axis=1
    )


def decode_windows(
    encoded: tf.Tensor, windows: tf.Tensor, mirrored: tf.Tensor, image: tf.TensorSpec
) -> tf.Tensor:
    """Decodes a window of each image.

    Args:
      encoded: string [m]: JPEG, PNG or whatever else `tf.io.decode_image` reads.
      windows: int32 [m, 4].
      mirrored: bool [m].
      image: type of one result, [height, width, channels] of uint8 or uint16.

    Returns:
      [m, height, width, channels].

    Raises:
      tf.errors.InvalidArgumentError: when run on what is no image.
    """

    def one(row):
        data, window, mirror, reduction = row

        def jpeg(ratio):
            return tf.io.decode_and_crop_jpeg(
                data, window // ratio, image.shape[-1], ratio=ratio, **_JPEG
            )

        def jpegs():
            branches = [lambda r=r: jpeg(r) for r in REDUCTIONS]
            return tf.switch_case(log2(reduction), branches)

        def other():
            pixels = tf.io.decode_image(data, image.shape[-1], image.dtype, expand_animations=False)
            return shrink(cut(pixels, window), reduction)

        if image.dtype == tf.uint8:
            shown = tf.cond(tf.io.is_jpeg(data), jpegs, other)
        else:
            shown = other()
        return show(shown, mirror, image)

    rows = (encoded, windows, mirrored, reductions(windows, image.shape[:2]))
    return tf.map_fn(one, rows, fn_output_signature=image, parallel_iterations=1)


def log2(reductions: tf.Tensor) -> tf.Tensor:
    """int32: 0, 1, 2, 3 for 1, 2, 4, 8; any shape."""
    return tf.reduce_sum(tf.cast(reductions[..., None] > tf.constant(REDUCTIONS), tf.int32), -1)


def decode_levels(data: tf.Tensor, num_levels: tf.Tensor, channels: int, dtype) -> tf.Tensor:
    """Decodes one image whole, a JPEG at its first `num_levels` sizes: all pixels, flat.

    What `decode_windows` shows of a JPEG at 1/r of its size is a part of the level of that size.
    """

    def jpegs():
        levels = [
            tf.cond(
                level < num_levels,
                lambda r=r: tf.reshape(tf.io.decode_jpeg(data, channels, r, **_JPEG), [-1]),
                lambda: tf.zeros([0], tf.uint8),
            )
            for level, r in enumerate(REDUCTIONS)
        ]
        return tf.concat(levels, 0)

    def other():
        pixels = tf.io.decode_image(data, channels, dtype, expand_animations=False)
        return tf.reshape(pixels, [-1])

    return tf.cond(tf.io.is_jpeg(data), jpegs, other) if dtype == tf.uint8 else other()


def cut(pixels: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    """The part [h, w, channels] of `pixels` (height, width, channels) within a window."""
    y, x, height, width = tf.unstack(window, num=4)
    return pixels[y : y + height, x : x + width]


def shrink(pixels: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Averages squares of `factor` pixels a side; what fills no square at the edge is left out."""

    def means():
        height, width = tf.shape(pixels)[0] // factor, tf.shape(pixels)[1] // factor
        channels = pixels.shape[-1]
        squares = tf.reshape(
            pixels[: height * factor, : width * factor], [height, factor, width, factor, channels]
        )
        return _rounded(tf.reduce_mean(tf.cast(squares, tf.float32), axis=[1, 3]), pixels.dtype)

    return tf.cond(factor > 1, means, lambda: pixels)


def show(pixels: tf.Tensor, mirror: tf.Tensor, image: tf.TensorSpec) -> tf.Tensor:
    """Resizes one image of any size to the shape of `image`, mirrored left to right or not."""
    resized = resize(pixels, image)
    return tf.cond(mirror, lambda: tf.reverse(resized, [1]), lambda: resized)


def resize(pixels: tf.Tensor, image: tf.TensorSpec) -> tf.Tensor:
    """Resizes one image of any size bilinearly to the shape and type of `image`."""
    # What `tf.image.resize` comes to, without the dozen operations it checks its arguments with.
    resized = tf.raw_ops.ResizeBilinear(
        images=pixels[None], size=image.shape[:2], half_pixel_centers=True
    )
    return tf.ensure_shape(_rounded(resized[0], image.dtype), image.shape)


def _rounded(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Nearest integer of values from 0 to the type's largest; casting alone would darken."""
    if dtype == tf.uint8:  # the same, to the last bit, in one pass instead of two
        pixels = tf.quantization.quantize(values, 0.0, 255.0, tf.quint8, "MIN_FIRST")[0]
        return tf.bitcast(pixels, tf.uint8)
    return tf.cast(values + 0.5, dtype) if dtype.is_integer else values
