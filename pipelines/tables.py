"""Rows of figures as a table, JSON lines or CSV, on stdout or in a file; for all benchmarks."""

import contextlib
import csv
import io
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from absl import flags

from pipelines.errors import UserError

FORMATS = ("table", "jsonl", "csv")
Row = dict[str, Any]


def define_flags(values: flags.FlagValues) -> None:
    """Defines --format and --output on `values`."""
    flags.DEFINE_enum(
        "format",
        "table",
        FORMATS,
        "How to write the rows: jsonl and csv hold all there is to know, table is for people.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "output", None, "File to write the rows to (default: stdout).", flag_values=values
    )


@contextlib.contextmanager
def opened(path: str | None) -> Iterator[TextIO]:
    """What to write to, checked before anything is measured; stdout for None.

    A file is written at the end alone: what is interrupted leaves an older one as it was.

    Raises:
      UserError: if it cannot be written.
    """
    if path is None:
        yield sys.stdout
        return
    check_writable("output", path)
    text = io.StringIO()
    yield text
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())
    except OSError as error:
        raise UserError(f"--output={path}: cannot write there: {error.strerror}") from error


def check_writable(flag: str, path: str) -> None:
    """Refuses a file that could not be written, before work is spent on its content.

    Raises:
      UserError: naming the flag.
    """
    folder = os.path.dirname(path) or "."
    if os.path.exists(path):
        possible = not os.path.isdir(path) and os.access(path, os.W_OK)
    else:
        possible = os.path.isdir(folder) and os.access(folder, os.W_OK)
    if not path or not possible:
        raise UserError(f"--{flag}={path}: cannot write there")


def write_rows(
    rows: Sequence[Row], form: str, output: TextIO, table_fn: Callable[[Sequence[Row]], Iterable]
) -> None:
    """Writes rows.

    Args:
      rows: what to write; they need not have the same fields.
      form: one of `FORMATS`.
      output: where to.
      table_fn: turns the rows into the lines that people read.
    """
    if form == "jsonl":
        output.writelines(_json(row) + "\n" for row in rows)
    elif form == "csv":
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(output, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    else:
        output.writelines(f"{line}\n" for line in table_fn(rows))


def _json(value: Any) -> str:
    return json.dumps(value, default=str)  # a flag's value may be a class


def _cell(value: Any) -> Any:
    return _json(value) if isinstance(value, dict | list | tuple) else value


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of several measurements, under names made from `name`."""
    return {
        name: statistics.median(values),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """How many times as fast ours is: of the medians, and least and greatest of one turn."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "ratio_min": min(pairs),
        "ratio_max": max(pairs),
    }
