"""Where each record of a TFRecord file begins, found by walking the records' headers.

The format (https://www.tensorflow.org/tutorials/load_data/tfrecord) is, per record: uint64 length,
uint32 masked CRC-32C of the length, the payload, uint32 masked CRC-32C of the payload.
"""

import concurrent.futures
import hashlib
import logging
import os
import struct
import tempfile
import time
from collections.abc import Sequence

import google_crc32c
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from pipelines.errors import UserError

_log = logging.getLogger(__name__)

HEADER_BYTES, FOOTER_BYTES = 12, 4
_FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES
_NEAR_BYTES = 1 << 16  # one read finds all headers within it
_THREADS = 16
_MIN_SECS_TO_CACHE = 1.0


def is_local(path: str) -> bool:
    """Whether the operating system opens `path`, rather than one of TensorFlow's file systems."""
    return "://" not in path


class File:
    """A file read at any offset, from any thread."""

    def __init__(self, path: str):
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY) if is_local(path) else None

    def read(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes from `offset` on; fewer at the end of the file."""
        if self._descriptor is None:
            with tf.io.gfile.GFile(self._path, "rb") as handle:
                handle.seek(offset)
                return handle.read(size)
        data = os.pread(self._descriptor, size, offset)
        while len(data) < size:
            more = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *_) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def is_intact(data: bytes, masked_crc: bytes) -> bool:
    """Whether the checksum stored beside `data` is its own."""
    crc = google_crc32c.value(data)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return masked_crc == masked.to_bytes(4, "little")


def walk(path: str) -> np.ndarray:
    """Finds the records of one TFRecord file without reading their payload.

    Returns:
      int64 [n + 1]: where each of the n whole records begins, and where the last one ends. A file
      that is damaged or cut off yields the records before that place.

    Raises:
      UserError: if it cannot be read.
    """
    try:
        return _walk(path, file_size(path))
    except (OSError, tf.errors.OpError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _walk(path: str, size: int) -> np.ndarray:
    offsets = [0]
    with File(path) as file:
        near, base = b"", 0
        offset, step = 0, 0
        while offset + _FRAME_BYTES <= size:
            at = offset - base
            if at + HEADER_BYTES > len(near):
                wanted = _NEAR_BYTES if step < _NEAR_BYTES // 8 else HEADER_BYTES
                near, base, at = file.read(wanted, offset), offset, 0
            header = near[at : at + HEADER_BYTES]
            if len(header) < HEADER_BYTES or not is_intact(header[:8], header[8:]):
                break
            step = struct.unpack_from("<Q", header)[0] + _FRAME_BYTES
            offset += step
            if offset > size:
                break
            offsets.append(offset)
    return np.array(offsets, np.int64)


def file_size(path: str) -> int:
    """Bytes in a file.

    Raises:
      UserError: if there is none.
    """
    return _stat(path)[0]


def _stat(path: str) -> tuple[int, int]:
    """(bytes, time of the last change in ns)."""
    try:
        if is_local(path):
            stat = os.stat(path)
            return stat.st_size, stat.st_mtime_ns
        stat = tf.io.gfile.stat(path)
        return stat.length, stat.mtime_nsec
    except (OSError, tf.errors.OpError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def record_offsets(paths: Sequence[str]) -> list[np.ndarray]:
    """`walk` of each file, kept in a cache folder if it took long.

    Raises:
      UserError: if a file cannot be read.
    """
    stats = [(str(path), *_stat(path)) for path in paths]
    key = hashlib.sha256(repr(stats).encode()).hexdigest()[:32]
    cached = os.path.join(_cache_dir(), f"{key}.npz")
    try:
        with np.load(cached) as arrays:
            return [arrays[str(i)] for i in range(len(paths))]
    except (OSError, ValueError, KeyError):
        pass
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        bar = tqdm(total=len(paths), desc="indexing files", unit="file", delay=2, disable=None)
        with bar:
            offsets = []
            for found in pool.map(walk, paths):
                offsets.append(found)
                bar.update()
    if time.monotonic() - start > _MIN_SECS_TO_CACHE:
        _keep(cached, offsets)
    return offsets


def _cache_dir() -> str:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(root, "pipelines", "record_offsets")


def _keep(path: str, offsets: list[np.ndarray]) -> None:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as handle:
            np.savez(handle, **{str(i): array for i, array in enumerate(offsets)})
        os.replace(handle.name, path)  # whole or not at all
    except OSError as error:
        _log.info("record offsets are not kept in %s: %s", os.path.dirname(path), error.strerror)
