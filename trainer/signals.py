"""Ctrl-C and SIGTERM become a wish to stop, which the loop grants between two compiled calls."""

import contextlib
import os
import signal
from collections.abc import Iterator

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Stopped(Exception):
    """The run was asked to stop, and has saved what it had."""

    def __init__(self, exit_code: int):
        super().__init__(f"stopped by a signal, exit code {exit_code}")
        self.exit_code = exit_code


class StopRequest:
    """Whether a signal has asked the run to stop."""

    def __init__(self):
        self.signum: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Handles the signals inside; a second Ctrl-C ends the process at once."""
        previous = {s: signal.signal(s, self._handle) for s in _EXIT_CODES}
        try:
            yield self
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _handle(self, signum, frame) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            os._exit(_EXIT_CODES[signum])
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM."""
        return _EXIT_CODES[self.signum]

    def raise_if_received(self) -> None:
        """Raises `Stopped` if a signal has come."""
        if self.signum is not None:
            raise Stopped(self.exit_code)
