"""Chooses the reader of a split, from what it takes and what this machine has."""

import dataclasses
import logging

import numpy as np
import tensorflow as tf

from pipelines import memory, pixels, resources
from pipelines.bad_records import BAD, FAILURES
from pipelines.decode import SHAPE, Decoder
from pipelines.disk import DiskReader
from pipelines.errors import UserError
from pipelines.order import Order
from pipelines.records import Records
from pipelines.source import Split

_log = logging.getLogger(__name__)

_SHARE_OF_FREE_MEMORY = 0.6
_WINDOW_BYTES = 128 << 20
_MIN_WINDOW_BATCHES = 8
_BLOCK_BYTES = 1 << 20
_MIN_BLOCKS_IN_WINDOW = 64


def open_reader(kind: str, records: Records, decoder: Decoder, split: Split):
    """Makes the reader `kind` asks for, or for "auto" the one that suits, and logs why.

    Raises:
      UserError: if the split does not fit in memory as asked, or holds a bad record that is not
        to be skipped.
    """
    free = memory.free_memory_bytes()
    room = _SHARE_OF_FREE_MEMORY * free
    prepared = records.num_examples * records.mean_bytes
    row = sum(t.dtype.size * t.shape.num_elements() for t in decoder.types.values())
    needed = prepared if decoder.view else records.num_examples * row
    local = all(resources.is_local(path) for path in records.paths)
    numbers = (
        f"{_size(prepared)} prepared, "
        + ("" if decoder.view else f"{_size(needed)} decoded, ")
        + f"{_size(free)} of memory free, {'local' if local else 'remote'} files"
    )
    if kind == "memory" and needed > room:
        raise UserError(
            f"--reader=memory: {split} needs {_size(needed)} of the {_size(free)} of memory that "
            f"are free; take a slice such as --train_split={split.name}[:10%], or --reader=indexed"
        )
    why = "" if kind != "auto" else " (chosen automatically)"
    if kind == "auto":
        kind = "memory" if needed <= room else "indexed" if local else "stream"
    if kind != "memory":
        _log.info("%s: reader %s%s: %s", split, kind, why, numbers)
        return DiskReader(kind, records, decoder)
    if not decoder.view:
        _log.info("%s: reader memory%s: %s", split, why, numbers)
        return memory.load(records, decoder, str(split))
    arrays = memory.load_encoded(records, decoder, str(split))
    return _hold_images(arrays, records, decoder, split, f"{why}: {numbers}")


def _hold_images(arrays, records: Records, decoder: Decoder, split: Split, why: str):
    """Holds images that vary in size decoded, where they fit, or as they are encoded."""
    encoded = arrays[decoder.input_key]
    bad = arrays.get(BAD, np.zeros(len(encoded), bool))
    arrays[SHAPE][bad] = 1
    levels = pixels.Levels(encoded, arrays[SHAPE], decoder)
    needed = levels.size * decoder.types[decoder.input_key].dtype.size
    fits = needed <= _SHARE_OF_FREE_MEMORY * memory.free_memory_bytes()
    form = "decoded" if fits else "encoded"
    _log.info("%s: reader memory, images %s%s, %s decoded", split, form, why, _size(needed))
    if not fits:
        return memory.EncodedReader(arrays, decoder, records.bad)
    del arrays[decoder.input_key]
    values, failed = pixels.decode_all(encoded, levels, decoder, records.bad, str(split))
    for position in np.flatnonzero(failed):
        records.bad.note(int(position), "it cannot be decoded")
    if records.bad.skip:
        arrays[BAD] |= failed
    return pixels.PixelReader(arrays, levels, values, decoder, records.bad)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f} GB"


def windowed(order: Order, records: Records, window: int | None) -> Order:
    """The order of the stream reader: long reads, and a bounded number of examples in memory.

    Args:
      order: the same without windows.
      records: the split's.
      window: examples shuffled together; None: what fits in 128 MB, and no fewer than 8 batches.
    """
    if not order.shuffle:
        return order
    mean = max(1.0, records.mean_bytes)
    chosen = window or max(int(_WINDOW_BYTES / mean), _MIN_WINDOW_BATCHES * order.batch_size)
    chosen = min(chosen, order.num_examples)
    block = int(min(_BLOCK_BYTES / mean, chosen / _MIN_BLOCKS_IN_WINDOW))
    return dataclasses.replace(order, window=chosen, block=max(1, block))


def count_classes(records: Records, label_key: str) -> int:
    """One more than the largest of a split's labels (a plain integer); 0 if one is negative.

    Reads every record once, without decoding more than the label.
    """
    largest = -1
    for start in range(0, records.num_examples, 4096):
        positions = np.arange(start, min(start + 4096, records.num_examples))
        labels = _labels(records, positions, label_key)
        if np.any(labels < 0):
            return 0
        largest = max(largest, int(labels.max(initial=-1)))
    return largest + 1


def _labels(records: Records, positions: np.ndarray, label_key: str) -> np.ndarray:
    """int64 [at most m]: labels of the records that hold one; the others are noted as bad."""
    raw = [record for record in records.read(positions) if record]
    spec = {label_key: tf.io.FixedLenFeature([], tf.int64)}
    try:
        return tf.io.parse_example(tf.constant(raw, tf.string), spec)[label_key].numpy()
    except FAILURES:
        if len(positions) == 1:
            records.bad.note(int(positions[0]), "it cannot be decoded")
            return np.zeros(0, np.int64)
    halves = np.array_split(positions, 2)
    return np.concatenate([_labels(records, half, label_key) for half in halves])
