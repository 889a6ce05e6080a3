"""Finds what a user names on a flag as `package.module:attribute`, or hands over in Python."""

import functools
import importlib
import os
import re
import sys
import traceback
from typing import Any

from pipelines.errors import UserError

_SYMBOL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_symbol(value: Any) -> bool:
    """Whether `value` has the form `package.module:attribute` (a TFDS `name:1.0.0` has not).

    A class or function itself counts too: from Python it may stand where a flag names one.
    """
    return callable(value) or bool(_SYMBOL.fullmatch(value))


def symbol_name(value: Any) -> Any:
    """`package.module:attribute` of a class or function; anything else as it is.

    Of a `functools.partial` that of its function, of another callable object that of its class.
    """
    if not callable(value):
        return value
    while isinstance(value, functools.partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def load_symbol(flag: str, text: Any) -> Any:
    """Imports `package.module:attribute`; the current directory is importable.

    Args:
      flag: the flag's name, for the error message.
      text: what the user gave; a class or function is returned as it is.

    Raises:
      UserError: if the module or the attribute does not exist, or the module fails to import.
    """
    if callable(text):
        return text
    module_name, _, attribute = text.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"--{flag}={text}: cannot import {module_name} from {os.getcwd()} or the installed "
            f"packages: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise UserError(
            f"--{flag}={text}: {module_name} has no {attribute!r}; it has {', '.join(names)}"
        )
    return getattr(module, attribute)


def call_symbol(flag: str, text: Any, *args, **kwargs) -> Any:
    """Calls what `load_symbol` finds; what the user's code raises becomes one line.

    Raises:
      UserError: naming the flag, the exception and where it was raised.
    """
    fn = load_symbol(flag, text)
    try:
        return fn(*args, **kwargs)
    except UserError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"--{flag}={symbol_name(text)}: {type(error).__name__}: {error} "
            f"({frame.filename}, line {frame.lineno})"
        ) from error
