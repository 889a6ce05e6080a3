"""Random examples of a dataset's shapes, made once: what a pipeline could do without reading."""

import numpy as np
import tensorflow as tf

from pipelines.features import Spec

_POOL_EXAMPLES = 1024
_POOL_BYTES = 64 << 20
_PLAIN_CLASSES = 10  # of an integer label of which nothing is known


class SyntheticReader:
    """A few random examples that stand for all of a split's.

    Images are uniform over their type's range, labels over the classes, other integers over 0..9,
    floats over [0, 1). The content depends on the types alone.

    Attributes: as of every reader.
    """

    name, read_calls, calls_per_core, decode, bad = "synthetic", 0, 1, None, None

    def __init__(self, types: dict[str, tf.TensorSpec], spec: Spec, num_examples: int):
        """Takes the types of one example's features."""
        row_bytes = sum(t.dtype.size * t.shape.num_elements() for t in types.values())
        pool = min(num_examples, _POOL_EXAMPLES, max(1, _POOL_BYTES // row_bytes))
        rng = np.random.default_rng(0)
        self.num_examples, self.types = num_examples, types
        arrays = {
            key: _random(rng, (pool, *t.shape), t.dtype.as_numpy_dtype, _upper(spec, key))
            for key, t in types.items()
        }
        with tf.device("cpu:0"):
            self._tensors = {key: tf.constant(array) for key, array in arrays.items()}
        self._pool = pool

    def read(self, positions: tf.Tensor) -> dict[str, tf.Tensor]:
        """Examples for `positions` (int64 [m]), as tensors [m, ...]; graph code."""
        rows = positions % self._pool
        return {key: tf.gather(tensor, rows) for key, tensor in self._tensors.items()}


def _upper(spec: Spec, key: str) -> int | None:
    """One more than the largest integer of a feature; None: its type's whole range."""
    if key == spec.label_key:
        return spec.num_classes or _PLAIN_CLASSES
    return None if key == spec.input_key and spec.is_image else _PLAIN_CLASSES


def _random(rng, shape, dtype, upper: int | None) -> np.ndarray:
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.random(shape) < 0.5
    if kind in "iu":
        return rng.integers(0, upper or np.iinfo(dtype).max + 1, shape, dtype=dtype)
    return rng.random(shape).astype(dtype)
