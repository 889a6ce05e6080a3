"""Writing to a disk that may be full or read-only: whole or not at all, and said once."""

import logging
import os
import pathlib

import tensorflow as tf

_log = logging.getLogger(__name__)

# What writing a file raises, in Python and in TensorFlow.
WRITE_ERRORS = (OSError, tf.errors.OpError)


def reason(error: Exception) -> str:
    """What the operating system had to say, such as "No space left on device"."""
    if isinstance(error, tf.errors.OpError):  # {{node ...}} path; reason [Op:SaveV2]
        told = error.message or str(error) or type(error).__name__
        return told.rpartition("; ")[2].partition(" [Op:")[0]
    return getattr(error, "strerror", None) or str(error)


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part.

    A file that has this content already is left alone.

    Raises:
      OSError: naming `path`; its old content is untouched.
    """
    if _holds(path, text):
        return
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        _remove(temporary)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _holds(path: pathlib.Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False


def _remove(path: pathlib.Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # the reason why it could not be written holds for this as well
        pass


class Outage:
    """A time in which something cannot be written: warned of when it begins, told when it ends."""

    def __init__(self):
        self._lasting = False

    def failed(self, what: str | os.PathLike, error: Exception, consequence: str) -> None:
        """`what` could not be written."""
        if not self._lasting:
            _log.warning("%s cannot be written (%s): %s", what, reason(error), consequence)
        self._lasting = True

    def succeeded(self, what: str | os.PathLike) -> None:
        """`what` was written."""
        if self._lasting:
            _log.info("%s is written again", what)
        self._lasting = False
