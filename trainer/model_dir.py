"""The folder of a run: found or made, checked, and kept from other runs."""

import contextlib
import datetime
import logging
import os
import pathlib
from collections.abc import Iterator

from pipelines import UserError
from trainer.config import TrainConfig

_log = logging.getLogger(__name__)

_LOCK = ".lock"
_PATTERN = "*?[\\"


def open_folder(config: TrainConfig) -> pathlib.Path:
    """The folder of a run, made where it is to be new and checked for what would go wrong late.

    Raises:
      UserError: if it is missing, cannot be written to, or cannot hold a run.
    """
    if config.model_dir:
        path = pathlib.Path(config.model_dir)
        if not config.training and not path.is_dir():
            raise UserError(f"--model_dir={path}: no such folder")
    elif config.training:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        path = pathlib.Path("runs") / f"{now}-{os.getpid()}"
    else:
        raise UserError(f"--mode={config.mode} needs --model_dir, the folder of a trained run")
    if set(str(path)) & set(_PATTERN):
        raise UserError(
            f"--model_dir={path}: TensorFlow takes {' '.join(_PATTERN)} in it for a pattern, and "
            "would not find its checkpoints again: choose another name"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--model_dir={path}: cannot write there: {error.strerror}") from error
    for name in ("checkpoints", "best", "tensorboard", "export"):
        if (path / name).exists() and not (path / name).is_dir():
            raise UserError(f"--model_dir={path}: {name} in it must be a folder")
    for name in ("metrics.jsonl", "flags.txt", "result.json"):
        if (path / name).is_dir():
            raise UserError(f"--model_dir={path}: {name} in it must be a file")
    return path


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Keeps other runs out of the folder; the lock dies with its owner."""
    try:
        import fcntl
    except ImportError:
        _log.warning("%s: no file locks on this system: start no second run there", folder)
        yield
        return
    with open(folder / _LOCK, "a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise UserError(
                f"--model_dir={folder}: in use by another run (process {handle.read() or '?'})"
            ) from None
        except OSError:
            _log.warning("%s: its file system has no locks: start no second run there", folder)
        with contextlib.suppress(OSError):  # a full disk: the number is for people only
            os.ftruncate(handle.fileno(), 0)
            os.write(handle.fileno(), str(os.getpid()).encode())
        yield


def remove_if_unused(folder: pathlib.Path) -> None:
    """Takes back the folder of a run that failed before it wrote anything."""
    if os.listdir(folder) == [_LOCK]:
        (folder / _LOCK).unlink()
        folder.rmdir()
