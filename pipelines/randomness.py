"""Random numbers as arithmetic: hashes of (seed, epoch, position), the same on every machine.

Compiled by XLA or not, too: TensorFlow's own stateless operations draw other numbers there.
"""

import math

import tensorflow as tf

_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive seeds over all bits


def hash64(x: tf.Tensor) -> tf.Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014), element by element.

    Args:
      x: uint64 tensor.

    Returns:
      uint64 tensor of the same shape; every input bit affects every output bit.
    """
    shift, xor = tf.bitwise.right_shift, tf.bitwise.bitwise_xor
    x = x + tf.constant(_MIX, tf.uint64)
    x = xor(x, shift(x, tf.constant(30, tf.uint64))) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    x = xor(x, shift(x, tf.constant(27, tf.uint64))) * tf.constant(0x94D049BB133111EB, tf.uint64)
    return xor(x, shift(x, tf.constant(31, tf.uint64)))


def epoch_words(seed: int, epoch: tf.Tensor | int) -> tf.Tensor:
    """int32 [2] hashed from (seed, epoch): the seed of TensorFlow's stateless operations."""
    mixed = hash64(tf.cast(epoch, tf.uint64) + tf.constant((seed * _MIX) % 2**64, tf.uint64))
    return tf.bitcast(mixed, tf.int32)


def example_seeds(seed: int, epochs: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """One stateless seed per example and epoch, whatever else is in its batch.

    Args:
      seed: the run's seed.
      epochs: int64 [m].
      positions: int64 [m].

    Returns:
      int32 [m, 2].
    """
    # The salt keeps augmentation apart from the permutation of the same (seed, epoch).
    base = tf.constant((seed * _MIX + 0xA5A5A5A5) % 2**64, tf.uint64)
    by_epoch = hash64(tf.cast(epochs, tf.uint64) + base)
    return tf.bitcast(hash64(by_epoch + tf.cast(positions, tf.uint64)), tf.int32)


def salted(seeds: tf.Tensor, salt: int) -> tf.Tensor:
    """Seeds (int32 [m, 2]) of their own for each `salt`, so that two users do not draw alike."""
    return tf.bitcast(hash64(tf.bitcast(seeds, tf.uint64) + tf.constant(salt, tf.uint64)), tf.int32)


def uniform(seeds: tf.Tensor, *draws: int) -> tf.Tensor:
    """float32 [m, len(draws)] in [0, 1): the numbered draws of each example's seed (int32 [m, 2]).

    A single draw comes as [m].
    """
    offsets = tf.constant([(draw + 1) << 32 for draw in draws], tf.uint64)
    bits = hash64(tf.bitcast(seeds, tf.uint64)[:, None] + offsets)
    values = tf.cast(tf.bitwise.right_shift(bits, tf.constant(40, tf.uint64)), tf.float32) / 2.0**24
    return values[:, 0] if len(draws) == 1 else values


def normal(seeds: tf.Tensor, count: int) -> tf.Tensor:
    """float32 [m, count]: standard normal draws of each example's seed (int32 [m, 2]).

    By the transform of Box and Muller 1958, from `uniform` draws 0 to 2 * count - 1.
    """
    first, second = tf.split(uniform(seeds, *range(2 * count)), 2, axis=1)
    return tf.sqrt(-2.0 * tf.math.log(1.0 - first)) * tf.cos(2.0 * math.pi * second)
