"""The memory readers: a split is read once and held; batches are gathered from it by position."""

import os

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from pipelines import resources
from pipelines.bad_records import BAD, BadRecords, Examples, trusted
from pipelines.decode import Decoder
from pipelines.records import Records

_LOAD_BATCH = 512
_ALIGNMENT = 64
_CGROUPS = (  # (limit, use) in bytes: version 2, version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


class MemoryReader:
    """Examples of fixed shape, one tensor per feature.

    Attributes:
      num_examples: examples held.
      types: types of one example.
      bad: records that turned out unusable.
    """

    name, read_calls, calls_per_core, decode = "memory", 0, 1, None

    def __init__(self, arrays: dict[str, np.ndarray], bad: BadRecords):
        """Takes arrays [num_examples, ...] by position; BAD among them if records are skipped."""
        self._tensors = {key: host_tensor(array) for key, array in arrays.items()}
        self.num_examples = len(next(iter(arrays.values())))
        self.types = {
            key: tf.TensorSpec(t.shape[1:], t.dtype)
            for key, t in self._tensors.items()
            if key != BAD
        }
        self.bad = bad

    def read(self, positions: tf.Tensor) -> Examples:
        """Examples at int64 [m] positions, as tensors [m, ...]; graph code."""
        return {key: tf.gather(tensor, positions) for key, tensor in self._tensors.items()}


class EncodedReader:
    """Examples whose images are held as they are encoded, and decoded each time.

    Attributes: as of `MemoryReader`.
    """

    name, read_calls, calls_per_core = "memory", 0, 2

    def __init__(self, arrays: dict[str, np.ndarray], decoder: Decoder, bad: BadRecords):
        self._held, self._decoder = MemoryReader(arrays, bad), decoder
        self.num_examples, self.bad = self._held.num_examples, bad
        self.types = decoder.types
        self.read = self._held.read

    def decode(
        self, raw: Examples, positions: tf.Tensor, seeds: tf.Tensor, rescue: bool
    ) -> Examples:
        """Decodes the images of what `read` returned; graph code."""
        return self._decoder.finish(raw, positions, seeds, rescue)


def load(records: Records, decoder: Decoder, split: str) -> MemoryReader:
    """Reads and decodes a whole split of examples of fixed shape.

    Raises:
      UserError: for a bad record that is not to be skipped.
    """

    def examples(rescue, positions):
        seeds = tf.zeros([_LOAD_BATCH, 2], tf.int32)  # nothing is drawn
        return decoder.decode(records.tensor(positions), positions, seeds, rescue)

    return MemoryReader(_load(records, examples, decoder.types, split), records.bad)


def load_encoded(records: Records, decoder: Decoder, split: str) -> dict[str, np.ndarray]:
    """Reads a whole split, leaving images encoded: arrays for `EncodedReader`.

    Raises:
      UserError: for a bad record that is not to be skipped.
    """

    def examples(rescue, positions):
        return decoder.parse(records.tensor(positions), positions, rescue)

    return _load(records, examples, decoder.parsed_types, split)


def _load(records: Records, examples_fn, types, split: str) -> dict[str, np.ndarray]:
    """Arrays [num_examples, ...] of `types`, and BAD where bad records are skipped.

    They are what `examples_fn` makes of (whether to rescue, positions).
    """
    size = records.num_examples
    if records.bad.skip:
        types = {**types, BAD: tf.TensorSpec([], tf.bool)}
    arrays = {key: empty((size, *t.shape), t.dtype.as_numpy_dtype) for key, t in types.items()}

    def batches(rescue, taken):
        @tf.autograph.experimental.do_not_convert
        def examples(start):
            positions = tf.minimum(start + tf.range(_LOAD_BATCH, dtype=tf.int64), size - 1)
            return examples_fn(rescue, positions)

        calls = resources.num_cores()
        dataset = tf.data.Dataset.range(taken * _LOAD_BATCH, size, _LOAD_BATCH)
        dataset = dataset.map(examples, num_parallel_calls=calls).prefetch(1)
        return dataset.with_options(resources.dataset_options(calls))

    bar = tqdm(total=size, desc=f"reading {split}", delay=2, disable=None)
    with bar:
        for i, batch in enumerate(trusted(batches, split, records.bad)):
            start = i * _LOAD_BATCH
            count = min(_LOAD_BATCH, size - start)
            for key, array in arrays.items():
                array[start : start + count] = batch[key].numpy()[:count]
            bar.update(count)
    return arrays


def empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An uninitialised array, aligned so that TensorFlow can use it in place."""
    if np.dtype(dtype) == object:
        return np.empty(shape, object)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def host_tensor(array: np.ndarray) -> tf.Tensor:
    """A tensor in host memory that shares that of an array from `empty`, instead of copying it."""
    if array.ctypes.data % _ALIGNMENT == 0 and array.flags.c_contiguous:
        try:
            return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
        except (BufferError, TypeError, tf.errors.OpError):  # a type that cannot be shared
            pass
    with tf.device("cpu:0"):
        return tf.constant(array)


def free_memory_bytes() -> int:
    """Bytes this process can still take without swapping, a container's limit included."""
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        with open("/proc/meminfo") as lines:
            values = dict(line.split(":") for line in lines)
        free.append(int(values["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    for limit, used in _CGROUPS:
        try:
            with open(limit) as limit_file, open(used) as used_file:
                free.append(max(0, int(limit_file.read()) - int(used_file.read())))
        except (OSError, ValueError):  # no such group, or no limit ("max")
            pass
    return min(free)
