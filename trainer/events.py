"""TensorBoard event files, written without `tf.summary`, whose calls cost more than small steps."""

import os
import pathlib
import socket
import time
from collections.abc import Callable

import tensorflow as tf

_Event = tf.compat.v1.Event
_FILES = "events.out.tfevents.*"


class EventWriter:
    """Writes one event file; what `flush` has returned from survives a kill.

    The content is that of `tf.summary.scalar` and `tf.summary.image`.
    """

    def __init__(self, folder: pathlib.Path):
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # As TensorFlow names them: in the order in which they were begun, no two alike.
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        count = len(list(folder.glob(f"{name}.*")))
        self._writer = tf.io.TFRecordWriter(str(folder / f"{name}.{count:03d}.v2"))
        self._writer.write(_Event(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Writes scalars by their tags."""
        event = _Event(wall_time=time.time(), step=step)
        for tag, value in values.items():
            entry = event.summary.value.add(tag=tag)
            entry.metadata.plugin_data.plugin_name = "scalars"
            entry.metadata.data_class = 1  # DATA_CLASS_SCALAR
            entry.tensor.dtype = tf.float32.as_datatype_enum
            entry.tensor.tensor_shape.SetInParent()
            entry.tensor.float_val.append(value)
        self._writer.write(event.SerializeToString())

    def image(self, tag: str, image: tf.Tensor, step: int) -> None:
        """Writes an image, uint8 [height, width, channels]."""
        height, width, _ = image.shape
        parts = [str(width).encode(), str(height).encode(), tf.io.encode_png(image).numpy()]
        event = _Event(wall_time=time.time(), step=step)
        entry = event.summary.value.add(tag=tag)
        entry.metadata.plugin_data.plugin_name = "images"
        entry.metadata.data_class = 3  # DATA_CLASS_BLOB_SEQUENCE
        entry.tensor.CopyFrom(tf.make_tensor_proto(parts, dtype=tf.string))
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        """Hands everything to the file system."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()


def rewind(folder: pathlib.Path, stays: Callable[[str, int], bool]) -> None:
    """Merges a folder's event files into one of what `stays` by its (tag, step), each once."""
    files = sorted(folder.glob(_FILES)) if folder.is_dir() else []
    if not files:
        return
    merged = folder / f"{files[0].name.removesuffix('.resumed')}.resumed"
    temporary = folder / f".{merged.name}.tmp"
    seen = set()
    with tf.io.TFRecordWriter(str(temporary)) as writer:
        for record in _records(files):
            event = _Event.FromString(record)
            if event.HasField("file_version"):
                is_new = "header" not in seen
                seen.add("header")
            else:
                values = [
                    v
                    for v in event.summary.value
                    if (v.tag, event.step) not in seen and stays(v.tag, event.step)
                ]
                seen.update((value.tag, event.step) for value in values)
                is_new = bool(values)
                del event.summary.value[:]
                event.summary.value.extend(values)
            if is_new:
                writer.write(event.SerializeToString())
    os.replace(temporary, merged)
    for path in files:
        if path != merged:
            path.unlink()


def _records(files: list[pathlib.Path]):
    for path in files:
        try:
            yield from tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
        except tf.errors.DataLossError:  # the torn end of a killed run's file
            continue
