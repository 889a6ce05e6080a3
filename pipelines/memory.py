"""The memory reader: a split read once, held as one tensor per feature, gathered by position."""

import logging
import os

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from tqdm import tqdm

from pipelines.errors import UserError
from pipelines.source import Split, read_examples

_log = logging.getLogger(__name__)

_READ_BATCH = 1024
_MAX_SHARE_OF_FREE_MEMORY = 0.6


class MemoryReader:
    """Examples of one split, in memory.

    Attributes:
      num_examples: examples held.
      arrays: feature key -> array [num_examples, ...].
    """

    name = "memory"

    def __init__(self, arrays: dict[str, np.ndarray]):
        """Takes arrays [num_examples, ...], in file order."""
        with tf.device("cpu:0"):
            self._tensors = {key: tf.constant(array) for key, array in arrays.items()}
        self.arrays = {k: np.asarray(memoryview(t)) for k, t in self._tensors.items()}  # views
        self.num_examples = len(next(iter(arrays.values())))

    def fetch(self, positions: tf.Tensor) -> dict[str, tf.Tensor]:
        """Examples at `positions` (int64 [m]), as tensors [m, ...]; graph code."""
        return {key: tf.gather(tensor, positions) for key, tensor in self._tensors.items()}


def read_arrays(
    builder: tfds.core.DatasetBuilder, split: Split, features: dict
) -> dict[str, np.ndarray]:
    """Reads and decodes a whole split, in file order, with a progress bar if it takes long.

    Args:
      builder: a prepared dataset.
      split: what to read.
      features: feature key -> TFDS feature of fixed shape.

    Returns:
      feature key -> array [split.num_examples, *shape].

    Raises:
      UserError: if the split does not fit in memory, a record cannot be decoded, or there are
        fewer records than the dataset's metadata promises.
    """
    arrays = {
        key: np.empty((split.num_examples, *f.shape), f.np_dtype) for key, f in features.items()
    }
    _check_fits(builder, split, sum(array.nbytes for array in arrays.values()))
    batches = read_examples(builder, split, tuple(features)).batch(_READ_BATCH)
    done = 0
    with tqdm(total=split.num_examples, desc=f"reading {split}", delay=2, disable=None) as bar:
        try:
            for batch in batches.as_numpy_iterator():
                size = len(next(iter(batch.values())))
                for key, array in arrays.items():
                    array[done : done + size] = batch[key]
                done += size
                bar.update(size)
        except (tf.errors.OpError, ValueError) as error:
            raise UserError(
                f"{builder.info.full_name}, split {split}: cannot read the records after example "
                f"{done} of the files in {builder.data_dir}: {_reason(error)}"
            ) from error
    if done != split.num_examples:
        raise UserError(
            f"{builder.info.full_name}, split {split}: {done} records in {builder.data_dir} where "
            f"its metadata promises {split.num_examples}"
        )
    return arrays


def _reason(error: Exception) -> str:
    return str(getattr(error, "message", error)).splitlines()[0][:300]


def _check_fits(builder: tfds.core.DatasetBuilder, split: Split, num_bytes: int) -> None:
    free = free_memory_bytes()
    _log.info("holding %s in memory: %.1f MB (%.0f MB free)", split, num_bytes / 1e6, free / 1e6)
    if num_bytes > _MAX_SHARE_OF_FREE_MEMORY * free:
        raise UserError(
            f"{builder.info.full_name}, split {split}: needs {num_bytes / 1e9:.1f} GB in memory, "
            f"and {free / 1e9:.1f} GB are free; take a slice such as "
            f"--train_split={split.name}[:10%]"
        )


def free_memory_bytes() -> int:
    """Bytes this machine can still hand out without swapping."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
