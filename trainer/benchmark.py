"""Measures training: python -m trainer.benchmark --compare

One clock for input alone, the step alone and both together, in steps and examples per second; with
--compare also for the plain loops that people would write instead. Takes the flags of trainer.main.
"""

import contextlib
import csv
import dataclasses
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from absl import flags

import pipelines
from pipelines import UserError, cli
from trainer import config as config_lib

_log = logging.getLogger(__name__)

# What has no part in a benchmark: it trains on and on, saves nothing and evaluates nothing.
_UNUSED_FLAGS = (
    "mode",
    "model_dir",
    "resume",
    "init_from",
    "train_epochs",
    "train_steps",
    "eval_epochs",
    "eval_steps",
    "eval_split",
    "eval_batch_size",
    "checkpoint_steps",
    "checkpoint_secs",
    "max_to_keep",
    "best_metric",
    "early_stopping_patience",
    "target_metric",
    "on_nan",
    "max_rollbacks",
    "export",
    "profile_steps",
    "progress",
    "callback",
)


FORMATS = ("table", "jsonl", "csv")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure. Field meanings: the help of the flag of that name."""

    compare: bool = False
    num_steps: int | None = None
    num_warmup_steps: int | None = None
    repeats: int = 5


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `Settings`, --format and --output on `values`."""
    flags.DEFINE_boolean(
        "compare",
        False,
        "Also train the same through the loops people would write instead, and model.fit.",
        flag_values=values,
    )
    flags.DEFINE_enum("format", "table", FORMATS, "How to write the rows.", flag_values=values)
    flags.DEFINE_string("output", None, "File to write the rows to.", flag_values=values)

    def integer(name, default, lower, text):
        flags.DEFINE_integer(name, default, text, lower_bound=lower, flag_values=values)

    integer("num_steps", None, 1, "Steps of a turn (default: those of 1.5 seconds).")
    integer(
        "num_warmup_steps",
        None,
        0,
        "Steps before each turn, off the clock (default: enough to use up what was prefetched); "
        "compilation is off the clock anyway.",
    )
    integer("repeats", 5, 1, "Turns of each variant, interleaved with those of the others.")


def main(argv: Sequence[str]) -> int:
    """Parses flags, measures, writes the rows; returns the exit code."""
    values = cli.parse_flags(
        argv, __doc__, config_lib.define_flags, pipelines.define_flags, define_flags
    )
    config = config_lib.config_from_flags(values)
    data_config = pipelines.config_from_flags(values)
    settings = Settings(**{f.name: values[f.name].value for f in dataclasses.fields(Settings)})
    cli.check_environment()
    cli.set_up_logging(values.verbosity)
    unused = [name for name in _UNUSED_FLAGS if values[name].value != values[name].default]
    if unused:
        _log.info("without effect in a benchmark: %s", ", ".join(f"--{name}" for name in unused))
    with _opened(values.output) as output:
        cli.import_tensorflow(values.verbosity)
        from trainer import speed

        rows = speed.measure(config, data_config, settings)
        write_rows(rows, values.format, output)
    return 0


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    """The file to write to, tried before anything is measured; stdout for None."""
    if path is None:
        yield sys.stdout
        return
    try:
        handle = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"--output={path}: cannot write there: {error.strerror}") from error
    with handle:
        yield handle


def write_rows(rows: list[dict[str, Any]], form: str, output: TextIO) -> None:
    """Writes the rows that `speed.measure` returns.

    Args:
      rows: one for each variant, then the summary.
      form: jsonl and csv write all there is to know; table is for people.
      output: where to.
    """
    if form == "jsonl":
        output.writelines(_json(row) + "\n" for row in rows)
    elif form == "csv":
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(output, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: _json(v) if isinstance(v, dict) else v for k, v in row.items()})
    else:
        output.writelines(line + "\n" for line in _table(rows))


def _json(value: Any) -> str:
    return json.dumps(value, default=str)  # a flag's value may be a class


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    *rows, summary = rows
    width = max(len(row["variant"]) for row in rows)
    yield f"{'variant':{width}}  {'steps/s':>9}  {'min .. max':^19}  {'examples/s':>11}  ratio"
    for row in rows:
        yield (
            f"{row['variant']:{width}}  {row['steps_per_sec']:9,.1f}  "
            f"{row['steps_per_sec_min']:9,.1f} {row['steps_per_sec_max']:9,.1f}  "
            f"{row['examples_per_sec']:11,.0f}  {row['ratio']:5.2f}"
            + (f"  {row['settings']}" if row["settings"] else "")
        )
    yield summary["text"]


if __name__ == "__main__":
    cli.run(main)
