"""The raw records of a split, by position: TFRecord and ArrayRecord files alike."""

import contextlib
import itertools
from typing import Protocol

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from pipelines import index
from pipelines.bad_records import BadRecords
from pipelines.errors import UserError
from pipelines.source import Split, Stretch, stretches

_RUN_BYTES = 8 << 20  # a longer run is read in pieces, to hold little twice


class Shard(Protocol):
    """One file of records, numbered from 0."""

    num_records: int
    num_bytes: int
    complaint: str | None  # what is wrong after its last whole record

    def read(self, numbers: np.ndarray) -> list[bytes | str]:
        """Records by ascending number (int64 [m]); for an unreadable one, the reason."""


class Records:
    """Random access to the raw records of a split.

    Attributes:
      num_examples: records, the unreadable included.
      paths: the files.
      mean_bytes: of a record, over the split's files.
      bad: those that turned out unusable.
    """

    def __init__(self, builder: tfds.core.DatasetBuilder, split: Split, skip_bad: bool):
        """Finds the records of every file.

        Raises:
          UserError: if a file is missing or of an unknown kind, or cut off and `skip_bad` is False.
        """
        self._stretches = stretches(builder, split)
        self._starts = np.cumsum([0] + [s.count for s in self._stretches])
        self.num_examples = int(self._starts[-1])
        self.bad = BadRecords(skip_bad, self.where, self.num_examples)
        self.paths = list(dict.fromkeys(s.path for s in self._stretches))
        shards = dict(zip(self.paths, _open_shards(builder, self.paths), strict=True))
        self._shards = [shards[s.path] for s in self._stretches]
        num_records = sum(s.num_records for s in shards.values())
        self.mean_bytes = sum(s.num_bytes for s in shards.values()) / max(1, num_records)
        for i, (stretch, shard) in enumerate(zip(self._stretches, self._shards, strict=True)):
            self._check_length(int(self._starts[i]), stretch, shard)

    def _check_length(self, start: int, stretch: Stretch, shard: Shard) -> None:
        extra = shard.num_records - stretch.num_in_shard
        if extra > 0:
            self.bad.note_extra(
                f"{stretch.path}: holds {shard.num_records} records where the dataset's metadata "
                f"promises {stretch.num_in_shard}"
            )
        missing = min(stretch.count, stretch.first + stretch.count - shard.num_records)
        if missing > 0:
            end = start + stretch.count
            reason = shard.complaint or "the file ends there"
            self.bad.note_missing(
                range(end - missing, end),
                f"{stretch.path}: {shard.num_records} records can be read where the dataset's "
                f"metadata promises {stretch.num_in_shard}: {reason}",
            )

    def where(self, position: int) -> str:
        """Names a record for a person: shard and number in it."""
        at = int(np.searchsorted(self._starts, position, "right")) - 1
        stretch = self._stretches[at]
        number = stretch.first + position - int(self._starts[at])
        return f"{stretch.path}, record {number}"

    def read(self, positions: np.ndarray) -> np.ndarray:
        """Reads records, neighbours in a file together.

        Args:
          positions: int64 [m], any order, repetitions allowed.

        Returns:
          bytes [m] as objects; b"" for an unreadable one, which is noted in `bad`.

        Raises:
          UserError: for an unreadable record, if bad records are not to be skipped.
        """
        wanted, places = np.unique(positions, return_inverse=True)
        owners = np.searchsorted(self._starts, wanted, "right") - 1
        edges = np.flatnonzero(np.diff(owners)) + 1
        found = []
        for some in np.split(wanted, edges):
            at = owners[len(found)]
            numbers = some - self._starts[at] + self._stretches[at].first
            shard = self._shards[at]
            known = numbers[numbers < shard.num_records]
            found += shard.read(known)
            found += [b""] * (len(numbers) - len(known))  # noted when the file was opened
        records = np.empty(len(found), object)
        for i, record in enumerate(found):
            if isinstance(record, str):
                self.bad.note(int(wanted[i]), record)
                record = b""
            records[i] = record
        return records[places]

    def tensor(self, positions: tf.Tensor) -> tf.Tensor:
        """`read` as graph code: string [m] for int64 [m]."""
        records = tf.numpy_function(self.read, [positions], tf.string)
        return tf.ensure_shape(records, positions.shape)


def _open_shards(builder: tfds.core.DatasetBuilder, paths: list[str]) -> list[Shard]:
    kind = builder.info.file_format
    if kind == tfds.core.FileFormat.TFRECORD:
        offsets = index.record_offsets(paths)
        return [TFRecordShard(*found) for found in zip(paths, offsets, strict=True)]
    if kind == tfds.core.FileFormat.ARRAY_RECORD:
        return [ArrayRecordShard(path) for path in paths]
    raise UserError(
        f"{builder.data_dir}: prepared as {kind.value}; only tfrecord and array_record can be read"
    )


class TFRecordShard:
    """A TFRecord file with its record offsets."""

    def __init__(self, path: str, offsets: np.ndarray):
        self._path, self._offsets = path, offsets
        self.num_records, self.num_bytes = len(offsets) - 1, int(offsets[-1])
        rest = index.file_size(path) - self.num_bytes
        self.complaint = f"{rest} bytes after them are no whole record" if rest else None

    def read(self, numbers: np.ndarray) -> list[bytes | str]:
        """See `Shard`."""
        if not len(numbers):
            return []
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(index.File(self._path))
                runs = np.split(numbers, self._run_edges(numbers))
                return [record for run in runs for record in self._read_run(file, run)]
            except (OSError, tf.errors.OpError) as error:
                return [f"cannot be read: {error}"] * len(numbers)

    def _run_edges(self, numbers: np.ndarray) -> np.ndarray:
        """Where a run of neighbours ends, or grows too long to be read at once."""
        pieces = self._offsets[numbers] // _RUN_BYTES
        return np.flatnonzero((np.diff(numbers) != 1) | (np.diff(pieces) != 0)) + 1

    def _read_run(self, file: index.File, run: np.ndarray) -> list[bytes | str]:
        bounds = self._offsets[run[0] : run[-1] + 2].tolist()
        base = bounds[0]
        data = memoryview(file.read(bounds[-1] - base, base))
        return [self._payload(data[a - base : b - base]) for a, b in itertools.pairwise(bounds)]

    def _payload(self, frame: memoryview) -> bytes | str:
        payload = bytes(frame[index.HEADER_BYTES : -index.FOOTER_BYTES])
        if index.is_intact(payload, frame[-index.FOOTER_BYTES :]):
            return payload
        return "its checksum does not match its content"


class ArrayRecordShard:
    """An ArrayRecord file, which carries its own index."""

    complaint = None

    def __init__(self, path: str):
        try:
            from array_record.python import array_record_module
        except ImportError:
            raise UserError(
                f"{path} is an ArrayRecord file: reading it needs `pip install array_record`"
            ) from None
        self.num_bytes = index.file_size(path)
        try:
            # No reading ahead: whoever asks for neighbours asks for them at once.
            self._reader = array_record_module.ArrayRecordReader(
                path, options="readahead_buffer_size:0"
            )
            self.num_records = self._reader.num_records()
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(f"{path}: not a whole ArrayRecord file: {error}") from error

    def read(self, numbers: np.ndarray) -> list[bytes | str]:
        """See `Shard`."""
        if not len(numbers):
            return []
        try:
            return self._reader.read(numbers.tolist())
        except (ValueError, RuntimeError, OSError) as error:
            if len(numbers) == 1:
                return [f"cannot be read: {str(error).splitlines()[0]}"]
            return [self.read(numbers[i : i + 1])[0] for i in range(len(numbers))]
