"""Augmentations that mix the examples of a batch: for the device, in the training step.

Pure functions of (inputs, labels, seed). Example 2i is mixed with example 2i + 1, which the
shuffled order has drawn at random, so that any even number of neighbouring rows is mixed the same
alone as within the global batch: replicas change nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from pipelines.randomness import salted, uniform

MIXES = ("mixup", "cutmix")

_MIXUP_ALPHA = 0.2  # Zhang et al. 2018, for ImageNet
_CUTMIX_ALPHA = 1.0  # Yun et al. 2019
_TABLE_SIZE = 4096

MixFn = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


def make_mix_fn(names: Sequence[str]) -> MixFn | None:
    """The mixes among the entries of --augment; of several, each step draws one.

    Returns:
      A function like `mixup`, or None.
    """
    fns = [{"mixup": mixup, "cutmix": cutmix}[name] for name in names if name in MIXES]
    if len(fns) < 2:
        return fns[0] if fns else None

    def one_of(inputs, labels, seed):
        drawn = tf.cast(tf.floor(_uniform(seed, 9, 1) * len(fns)), tf.int32)
        # Both, and then a choice: a branch on the device would cost more than a mix.
        results = [fn(inputs, labels, seed) for fn in fns]
        return tuple(tf.gather(tf.stack(options), drawn) for options in zip(*results, strict=True))

    return one_of


def mixup(
    inputs: tf.Tensor, labels: tf.Tensor, seed: tf.Tensor, alpha: float = _MIXUP_ALPHA
) -> tuple[tf.Tensor, tf.Tensor]:
    """Weighted means of pairs of examples (Zhang et al. 2018, arxiv.org/abs/1710.09412).

    Args:
      inputs: float [rows, ...], rows even.
      labels: float [rows, num_classes], one-hot or soft.
      seed: int32 [2], the same on all replicas and another in each step.
      alpha: the weight is drawn from Beta(alpha, alpha), one for all rows.

    Returns:
      (inputs, labels) of the same shapes and types.
    """
    weight = _beta(_uniform(seed, 1, 1), alpha)
    return _blend(inputs, weight), _blend(labels, weight)


def cutmix(
    inputs: tf.Tensor, labels: tf.Tensor, seed: tf.Tensor, alpha: float = _CUTMIX_ALPHA
) -> tuple[tf.Tensor, tf.Tensor]:
    """Pastes a rectangle of the other image (Yun et al. 2019, arxiv.org/abs/1905.04899).

    Args:
      inputs: float [rows, height, width, channels], rows even.
      labels: float [rows, num_classes]; mixed in proportion to the pixels of each image.
      seed: int32 [2], the same on all replicas and another in each step.
      alpha: the share of the rectangle is drawn from Beta(alpha, alpha), one for all rows.

    Returns:
      (inputs, labels) of the same shapes and types.
    """
    height, width = inputs.shape[1:3]
    draws = _uniform(seed, 2, 3)
    half = tf.sqrt(1 - _beta(draws[0], alpha)) / 2
    rows = _within(draws[1], half, height)[:, None]
    columns = _within(draws[2], half, width)[None, :]
    keep = 1 - tf.cast(rows & columns, tf.float32)
    return _blend(inputs, keep[:, :, None]), _blend(labels, tf.reduce_mean(keep))


def _within(center: tf.Tensor, half: tf.Tensor, side: int) -> tf.Tensor:
    """bool [side]: pixels whose middle lies within `half` of `center`, both as shares of `side`."""
    middles = (tf.range(side, dtype=tf.float32) + 0.5) / side
    return tf.abs(middles - center) < half


def _blend(rows: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """weight * own + (1 - weight) * partner's, for each pair of neighbouring rows."""
    if rows.shape[0] % 2:
        raise ValueError(f"mixing needs an even number of rows, not {rows.shape[0]}")
    pairs = tf.reshape(rows, [rows.shape[0] // 2, 2, *rows.shape[1:]])
    partners = tf.reshape(tf.reverse(pairs, [1]), rows.shape)
    weight = tf.cast(weight, rows.dtype)
    return weight * rows + (1 - weight) * partners


def _uniform(seed: tf.Tensor, salt: int, count: int) -> tf.Tensor:
    """float32 [count] in [0, 1), or a scalar for one; `salt` sets apart the draws of a step."""
    return uniform(salted(seed[None], salt), *range(count))[0]


def _beta(draw: tf.Tensor, alpha: float) -> tf.Tensor:
    """Turns a uniform draw into one of Beta(alpha, alpha), by a table: XLA has no gamma sampler."""
    place = draw * (_TABLE_SIZE - 1)
    low = tf.cast(tf.floor(place), tf.int32)
    table = tf.constant(_beta_quantiles(alpha), tf.float32)
    a, b = tf.gather(table, low), tf.gather(table, tf.minimum(low + 1, _TABLE_SIZE - 1))
    return a + (place - tf.floor(place)) * (b - a)


def _beta_quantiles(alpha: float) -> np.ndarray:
    """Quantiles of Beta(alpha, alpha) at `_TABLE_SIZE` even places of [0, 1].

    With v = x^alpha the density x^(alpha-1) (1-x)^(alpha-1) dx becomes (1-x)^(alpha-1) dv, which is
    smooth up to the middle; the other half is its mirror image.
    """
    v = np.linspace(0, 0.5**alpha, 1 << 16)
    x = v ** (1 / alpha)
    density = (1 - x) ** (alpha - 1)
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(v))])
    places = np.linspace(0, 1, _TABLE_SIZE)
    half = np.interp(np.minimum(places, 1 - places), mass / mass[-1] / 2, x)
    return np.where(places <= 0.5, half, 1 - half)
