"""Runs of the command as real processes that start at once and fail where a test wants them to.

A server imports TensorFlow, touches no device, and forks for each run: what differs from a fresh
interpreter is the import alone. Faults strike at calls to the operating system, which Python
announces to its audit hooks (https://docs.python.org/3/library/audit_events.html).
"""

import dataclasses
import multiprocessing
import os
import re
import resource
import sys

import builders  # noqa: F401  with what else a run would take seconds to import
import parts  # noqa: F401
import tensorflow_datasets  # noqa: F401

from pipelines import cli
from trainer import job  # noqa: F401
from trainer import main as main_lib


@dataclasses.dataclass(frozen=True)
class Fault:
    """What strikes before a call to the operating system.

    Attributes:
      event: the call's audit event, such as "open" or "os.rename" (which os.replace announces too).
      path: regular expression, found in the call's first two arguments.
      nth: which such call is the first to be struck, from 1.
      times: how many calls in a row are.
      signum: signal that the process sends itself; None: the call fails instead.
      errno: with which error.
    """

    event: str
    path: str = ""
    nth: int = 1
    times: int = 1
    signum: int | None = None
    errno: int | None = None


def inject(faults):
    """Makes faults strike in this process from now on."""
    calls = dict.fromkeys(faults, 0)

    def hook(event, args):
        for fault in calls:
            if event != fault.event or not re.search(fault.path, " ".join(map(str, args[:2]))):
                continue
            calls[fault] += 1
            if not 0 <= calls[fault] - fault.nth < fault.times:
                continue
            if fault.signum is not None:
                os.kill(os.getpid(), fault.signum)
            else:
                raise OSError(fault.errno, os.strerror(fault.errno), str(args[0]))

    if faults:
        sys.addaudithook(hook)


def run(argv, folder, output, env, limits, umask, faults):
    """What a forked process does: the command in `folder`, printing to the files `output`."""
    for descriptor, path in enumerate(output, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    for name, value in env.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    os.chdir(folder)
    os.umask(umask)
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    inject(faults)
    cli.run(main_lib.main, argv)


class Forked:
    """A forked run of the command, used like `subprocess.Popen`."""

    def __init__(self, argv, folder, output, env=(), limits=(), umask=0o022, faults=()):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._output = output
        args = (argv, folder, output, dict(env), dict(limits), umask, list(faults))
        self._process = context.Process(target=run, args=args, daemon=True)
        self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    @property
    def returncode(self):
        """Exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self):
        """The same."""
        return self._process.exitcode

    def send_signal(self, signum):
        """Sends a signal."""
        os.kill(self.pid, signum)

    def communicate(self, timeout=None):
        """Waits for the end; returns what was printed to stdout and stderr."""
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise AssertionError(f"the run did not end within {timeout} s")
        return [open(path, errors="replace").read() for path in self._output]
