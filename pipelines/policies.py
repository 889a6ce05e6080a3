"""Augmentations of colour and shape: jitter, and a policy that draws one operation per image."""

import math

import tensorflow as tf

from pipelines.randomness import uniform

_JITTER = 0.4  # factors of brightness, contrast and saturation lie within 1 -/+ this
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601
_LEVELS = 31  # magnitudes, as in TrivialAugment


def color(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Changes brightness, contrast and saturation, each by a factor in [0.6, 1.4].

    Args:
      images: [m, height, width, 1 or 3], integer pixels.
      seeds: int32 [m, 2].
    """
    factors = 1 - _JITTER + 2 * _JITTER * uniform(seeds, 0, 1, 2)
    brightness, contrast, saturation = tf.unstack(factors, axis=1)
    count, height, width, channels = images.shape
    pixels = tf.reshape(tf.cast(images, tf.float32), [count, height * width, channels])
    luma = tf.constant(_LUMA if channels == 3 else [1.0])[:, None]
    gray = tf.reduce_mean(pixels, axis=1) @ luma  # [m, 1]
    # All three at once, linear in the pixel: brightness, then contrast around the mean grey, then
    # saturation between the pixel's own grey and itself.
    own = tf.eye(channels) * saturation[:, None, None]
    own += tf.tile(luma, [1, channels]) * (1 - saturation)[:, None, None]
    own *= (brightness * contrast)[:, None, None]
    shift = gray * (brightness * (1 - contrast))[:, None]
    return tf.reshape(_to_pixels(pixels @ own + shift[:, None], images.dtype), images.shape)


def randaug(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """TrivialAugment (Müller and Hutter 2021): one operation per image, of random strength.

    The operation is drawn uniformly from `_OPERATIONS`, its strength from 31 levels.

    Args:
      images: [m, height, width, 1 or 3], integer pixels.
      seeds: int32 [m, 2].
    """
    draws = uniform(seeds, 0, 1, 2)
    operations = tf.cast(tf.floor(draws[:, 0] * len(_OPERATIONS)), tf.int32)
    strengths = tf.floor(draws[:, 1] * _LEVELS) / (_LEVELS - 1)
    signs = tf.where(draws[:, 2] < 0.5, -1.0, 1.0)
    image = tf.TensorSpec(images.shape[1:], images.dtype)

    def one(row):
        pixels, operation, strength, sign = row
        branches = [lambda fn=fn: fn(pixels, strength, sign) for fn in _OPERATIONS]
        return tf.ensure_shape(tf.switch_case(operation, branches), image.shape)

    rows = (images, operations, strengths, signs)
    return tf.map_fn(one, rows, fn_output_signature=image, parallel_iterations=1)


def _to_pixels(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.clip_by_value(values, 0.0, float(dtype.max)) + 0.5, dtype)


def _gray(pixels: tf.Tensor) -> tf.Tensor:
    if pixels.shape[-1] == 1:
        return pixels
    return tf.reduce_sum(pixels * _LUMA, axis=-1, keepdims=True)


def _blend(base_fn):
    """An operation that moves an image away from, or towards, what `base_fn` makes of it."""

    def operation(image, strength, sign):
        pixels = tf.cast(image, tf.float32)
        base = base_fn(pixels)
        return _to_pixels(base + (pixels - base) * (1 + 0.9 * sign * strength), image.dtype)

    return operation


def _blurred(pixels: tf.Tensor) -> tf.Tensor:
    kernel = tf.constant([[1, 1, 1], [1, 5, 1], [1, 1, 1]], tf.float32) / 13
    kernel = tf.tile(kernel[:, :, None, None], [1, 1, pixels.shape[-1], 1])
    return tf.nn.depthwise_conv2d(pixels[None], kernel, [1, 1, 1, 1], "SAME")[0]


def _identity(image, strength, sign):
    return image


def _autocontrast(image, strength, sign):
    pixels = tf.cast(image, tf.float32)
    low, high = (fn(pixels, axis=[0, 1]) for fn in (tf.reduce_min, tf.reduce_max))
    stretched = (pixels - low) * (float(image.dtype.max) / tf.maximum(high - low, 1.0))
    return _to_pixels(stretched, image.dtype)


def _posterize(image, strength, sign):
    dropped = image.dtype.size * 8 - 8 + tf.cast(tf.round(6 * strength), tf.int32)
    dropped = tf.cast(dropped, image.dtype)
    return tf.bitwise.left_shift(tf.bitwise.right_shift(image, dropped), dropped)


def _solarize(image, strength, sign):
    threshold = float(image.dtype.max) * (1 - strength)
    return tf.where(tf.cast(image, tf.float32) >= threshold, image.dtype.max - image, image)


def _warp(matrix_fn):
    """An operation that looks up each pixel (x, y) at an affine place, grey where that is outside.

    `matrix_fn(signed strength, height, width)` returns [a, b, c, d, e, f] of x' = ax + by + c and
    y' = dx + ey + f, from the centre.
    """

    def operation(image, strength, sign):
        height, width, _ = image.shape
        a, b, c, d, e, f = matrix_fn(strength * sign, height, width)
        x, y = (width - 1) / 2, (height - 1) / 2
        matrix = [a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y, 0.0, 0.0]
        pixels = image if image.dtype == tf.uint8 else tf.cast(image, tf.float32)
        warped = tf.raw_ops.ImageProjectiveTransformV3(
            images=pixels[None],
            transforms=tf.stack([tf.cast(v, tf.float32) for v in matrix])[None],
            output_shape=[height, width],
            interpolation="BILINEAR",
            fill_mode="CONSTANT",
            fill_value=float(image.dtype.max // 2),
        )
        return tf.cast(warped[0], image.dtype)

    return operation


def _rotation(strength, height, width):
    angle = strength * math.pi / 6
    return [tf.cos(angle), -tf.sin(angle), 0.0, tf.sin(angle), tf.cos(angle), 0.0]


_OPERATIONS = (
    _identity,
    _autocontrast,
    _posterize,
    _solarize,
    _blend(tf.zeros_like),  # brightness
    _blend(lambda pixels: tf.reduce_mean(_gray(pixels))),  # contrast
    _blend(_gray),  # saturation
    _blend(_blurred),  # sharpness
    _warp(_rotation),
    _warp(lambda s, height, width: [1.0, 0.3 * s, 0.0, 0.0, 1.0, 0.0]),  # shear
    _warp(lambda s, height, width: [1.0, 0.0, 0.0, 0.3 * s, 1.0, 0.0]),
    _warp(lambda s, height, width: [1.0, 0.0, 0.3 * s * width, 0.0, 1.0, 0.0]),  # shift
    _warp(lambda s, height, width: [1.0, 0.0, 0.0, 0.0, 1.0, 0.3 * s * height]),
)
