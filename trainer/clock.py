"""The one clock: seconds of a run by what they were spent on."""

import contextlib
import time
from collections.abc import Iterator

KINDS = ("startup", "compile", "train", "input", "eval", "checkpoint")


class Clock:
    """Adds up seconds by kind, over restarts.

    "train" is time really spent training, waiting for input included; "input" is that wait alone.
    Nothing else counts as training.
    """

    def __init__(self):
        self._secs = dict.fromkeys(KINDS, 0.0)
        self._window_start = dict(self._secs)

    @contextlib.contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Adds the time spent inside to `kind`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._secs[kind] += time.perf_counter() - start

    def add(self, kind: str, secs: float) -> None:
        """Adds seconds measured elsewhere."""
        self._secs[kind] += secs

    def total(self, kind: str) -> float:
        """Seconds of a kind since the run began."""
        return self._secs[kind]

    def window(self, kind: str) -> float:
        """Seconds of a kind since the last `start_window`."""
        return self._secs[kind] - self._window_start[kind]

    def start_window(self) -> None:
        """Begins a new window, as after a train row."""
        self._window_start = dict(self._secs)

    def state(self) -> dict:
        """What a checkpoint keeps."""
        return {"secs": self._secs, "window_start": self._window_start}

    def restore(self, state: dict) -> None:
        """Goes on from a checkpoint, keeping this process's own start-up and compile time."""
        own = {kind: self._secs[kind] for kind in ("startup", "compile")}
        self._secs = {**dict.fromkeys(KINDS, 0.0), **state["secs"], **own}
        self._window_start = {**dict.fromkeys(KINDS, 0.0), **state["window_start"]}
