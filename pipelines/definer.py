"""Defines flags from the dataclass that they become: its fields' names, its values as defaults."""

import dataclasses
import numbers
import os
import typing
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from pipelines.errors import UserError

flags.disclaim_key_flags()  # --help lists a flag under the module that asks for it


class FlagDefiner:
    """`DEFINE_*` with what all flags of one dataclass share.

    Every method takes the name of a field and the help text of its flag. A flag is refused a value
    outside its bounds when it is parsed.
    """

    def __init__(self, values: flags.FlagValues, defaults: Any):
        """Takes what to define on, and an instance of the dataclass with all its defaults."""
        self._values, self._defaults = values, defaults

    def _define(self, kind, name: str, text: str, **bounds) -> None:
        default = getattr(self._defaults, name)
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        kind(name=name, default=default, help=text, flag_values=self._values, **bounds)

    def string(self, name: str, text: str) -> None:
        self._define(flags.DEFINE_string, name, text)

    def boolean(self, name: str, text: str) -> None:
        self._define(flags.DEFINE_boolean, name, text)

    def integer(self, name: str, text: str, lower: int = 1) -> None:
        self._define(flags.DEFINE_integer, name, text, lower_bound=lower)

    def number(self, name: str, text: str, lower: float = 0.0, upper: float | None = None) -> None:
        self._define(flags.DEFINE_float, name, text, lower_bound=lower, upper_bound=upper)

    def choice(self, name: str, choices: Sequence[str], text: str) -> None:
        self._define(flags.DEFINE_enum, name, text, enum_values=choices)

    def items(self, name: str, text: str) -> None:
        """Defines a list of comma-separated strings; the field is a tuple."""
        self._define(flags.DEFINE_list, name, text)


_KINDS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string, or where a flag names one a class or function",
}


def settle_types(config: Any) -> None:
    """Gives a frozen dataclass made in Python the types that its flags would have given it.

    Numpy's numbers become plain ones, paths strings, lists tuples.

    Raises:
      UserError: for a value of another type, naming the field.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_row = isinstance(value, (list, tuple))
        settled = tuple(map(_plain, value)) if is_row else _plain(value)
        if not _fits(settled, field.type):
            raise UserError(f"--{field.name}={value!r}: must be {_describe(field.type)}")
        object.__setattr__(config, field.name, settled)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for abstract, plain in ((numbers.Integral, int), (numbers.Real, float)):
        if isinstance(value, abstract):
            return value if isinstance(value, bool) else plain(value)
    return value


def _fits(value: Any, kind: Any) -> bool:
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(v, inner[0]) for v in value)
    if inner:  # a union
        return any(_fits(value, each) for each in inner)
    if kind is str:
        return isinstance(value, str) or callable(value)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)


def _describe(kind: Any) -> str:
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return f"a tuple, each {_KINDS[inner[0]]}"
    return _KINDS[kind] if not inner else f"{_describe(inner[0])}, or None"


def check_values(config: Any, define_fn: Callable[[flags.FlagValues], None]) -> None:
    """Refuses what the flags of a dataclass's fields would refuse, for one made in Python.

    Args:
      config: the dataclass.
      define_fn: defines its flags.

    Raises:
      UserError: naming the flag, the value and what it may be.
    """
    values = flags.FlagValues()
    define_fn(values)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, (bool, int, float, str)) and field.name in values:
            try:
                values[field.name].parse(str(value))
            except flags.Error as error:
                raise UserError(str(error)) from None
