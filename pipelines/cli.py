"""What every command of this package does around its work: parse flags, tell errors, exit."""

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from absl import flags
from absl import logging as absl_logging
from tqdm import tqdm

from pipelines.errors import UserError

_log = logging.getLogger(__name__)

# A disk that is full, read-only, closed to this user, or broken, or no possible name: for the user
# to mend.
_DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG),
)

DefineFn = Callable[[flags.FlagValues], None]


def parse_flags(argv: Sequence[str], doc: str, *define_fns: DefineFn) -> flags.FlagValues:
    """Parses `argv` against the flags that `define_fns` define on a fresh `FlagValues`.

    A fresh `FlagValues` lets several commands, or one command twice, run in one process.

    Args:
      argv: program name followed by arguments.
      doc: the program's description, printed by --help.
      *define_fns: each defines a group of flags.

    Raises:
      UserError: for an unknown flag, a refused value, a missing flagfile, a leftover argument.
      SystemExit: with code 0 after --help.
    """
    values = flags.FlagValues()
    flags.DEFINE_boolean("help", False, "Print the flags and exit.", flag_values=values)
    for alias in ("helpfull", "helpshort"):
        flags.DEFINE_boolean(alias, False, "The same as --help.", flag_values=values)
    flags.DEFINE_integer(
        "verbosity",
        0,
        "What is logged: -1 warnings, 0 information, 1 and more also debugging and TensorFlow's "
        "own start-up messages.",
        flag_values=values,
    )
    for define in define_fns:
        define(values)
    for argument in argv[1:]:
        if argument != "".join(argument.rstrip().splitlines()):
            raise UserError(
                f"{argument!r}: a line break, or white space at its end, which no flagfile can hold"
            )
        if any("\ud800" <= letter <= "\udfff" for letter in argument):  # undecodable bytes
            raise UserError(f"{argument!r}: not UTF-8, which TensorFlow needs of every path")
    try:
        leftover = values(list(argv))[1:]
    except flags.Error as error:
        raise UserError(str(error)) from None
    except OSError as error:  # absl lets some unreadable flagfiles through
        raise UserError(f"--flagfile: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--flagfile: not a text file: {error}") from None
    if values.help or values.helpfull or values.helpshort:
        print(f"{doc.strip()}\n\nFlags (also read from --flagfile=FILE):\n{values.get_help()}")
        raise SystemExit(0)
    if leftover:
        raise UserError(
            f"unexpected argument {leftover[0]!r}: everything is given as --flag=value (see --help)"
        )
    return values


def changed(values: flags.FlagValues, name: str) -> bool:
    """Whether a flag has another value than its default, on the command line or in a flagfile."""
    return values[name].value != values[name].default


def tell_unused(
    values: flags.FlagValues, names: Sequence[str], why: str = "without effect in a benchmark"
) -> None:
    """Logs which of the flags `names`, that a benchmark has no use for, were given a value."""
    unused = [f"--{name}" for name in names if changed(values, name)]
    if unused:
        _log.info("%s: %s", why, ", ".join(unused))


def flags_text(values: flags.FlagValues) -> str:
    """A flagfile that sets every flag of a command to its value.

    Flags of other rooms may be unknown to who reads it, so that what measures or shows the input
    takes the flagfile of a training run too.
    """
    lines, strangers = {}, []
    for module, module_flags in values.flags_by_module_dict().items():
        if module == __name__:
            continue
        for flag in module_flags:
            if flag.value is not None:
                lines[flag.name] = flag.serialize()
            if not module.startswith("pipelines."):
                strangers.append(flag.name)
    undefok = f"--undefok={','.join(sorted(strangers))}\n" if strangers else ""
    return undefok + "".join(f"{lines[name]}\n" for name in sorted(lines))


def check_environment() -> None:
    """Refuses another Keras backend before anything is imported with it.

    Raises:
      UserError: naming it.
    """
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        raise UserError(f"KERAS_BACKEND={backend}: this package needs tensorflow, or it unset")
    # A keras.json may name another one; the environment overrides it.
    os.environ["KERAS_BACKEND"] = "tensorflow"


def import_tensorflow(verbosity: int) -> None:
    """Imports TensorFlow, without its start-up messages unless `verbosity` is positive."""
    quiet = contextlib.nullcontext()
    if verbosity < 1:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        quiet = _stderr_closed()
    with quiet:
        import tensorflow as tf

        tf.config.list_physical_devices()  # looks for drivers, and complains, once
    tf.get_logger().setLevel("WARNING" if verbosity > 0 else "ERROR")


@contextlib.contextmanager
def _stderr_closed() -> Iterator[None]:
    """Drops what native code writes to stderr: its first messages obey no log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def set_up_logging(verbosity: int) -> None:
    """Logs this package's lines to stderr."""
    absl_logging.set_verbosity(verbosity if verbosity > 0 else absl_logging.ERROR)
    for room in ("pipelines", "trainer"):
        logger = logging.getLogger(room)
        logger.setLevel(logging.WARNING if verbosity < 0 else logging.INFO)
        logger.handlers[:] = [_StderrHandler()]
        logger.propagate = False


class _StderrHandler(logging.Handler):
    """Writes `message` or `warning: message`, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        tqdm.write(prefix + record.getMessage(), file=sys.stderr)


def run(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> None:
    """Runs `main(argv)` and exits with its code, telling a user's mistake in one line.

    Exit codes: what `main` returns; 1 after a mistake; 130 after Ctrl-C.
    """
    try:
        code = main(sys.argv if argv is None else argv)
    except UserError as error:
        code = _tell(str(error))
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        code = _tell(f"{error.strerror}: {error.filename or 'a file of this run'}")
    sys.stdout.flush()
    sys.exit(code)


def _tell(message: str) -> int:
    sys.stdout.flush()
    line = " ".join(message.splitlines())  # whatever it quotes
    print(f"error: {line}", file=sys.stderr, flush=True)
    return 1
