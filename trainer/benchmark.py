"""Measures training: python -m trainer.benchmark --compare

One clock for input alone, the step alone and both together, in steps and examples per second; with
--compare also for the plain loops that people would write instead. Takes the flags of trainer.main.
Turns are interleaved, so that the machine's drift hits all alike.

One row (JSON object, CSV line) for each variant, then a summary. The variants are `input`; `step`,
which trains on one chunk of batches again and again; `end_to_end`, the loop as trainer.main runs it,
metrics, rows and TensorBoard included; and with --compare `one_device` (of --strategy=mirrored),
`straightforward_loop` (of several replicas), `textbook_slicing`, `textbook_gather`, `model_fit` and
`model_fit_best`. All rows have:

| field | type | meaning |
|---|---|---|
| variant | str | see above; `summary` for the last row |
| replicas | int | replicas of all variants that can have several |
| reader | str | the reader of the training split |
| flags | dict | all flags |
| machine | dict | `cpu`, `cores`, `memory_gb`, `gpus` |
| versions | dict | python and packages |

All rows but the summary:

| field | type | meaning |
|---|---|---|
| steps_per_sec | float | steps by seconds, median of the turns |
| steps_per_sec_min | float | of the slowest turn |
| steps_per_sec_max | float | of the fastest turn |
| examples_per_sec | float | global: steps by seconds times the mean number of examples of a step |
| examples_per_sec_min | float | of the slowest turn |
| examples_per_sec_max | float | of the fastest turn |
| ratio | float | speed of `end_to_end` by this one's, of the medians |
| ratio_min | float | the least of one turn |
| ratio_max | float | the greatest of one turn |
| steps | int | steps of a turn, as counted; a turn goes on to the end of its compiled call |
| warmup_steps | int | steps before each turn, off the clock |
| repeats | int | turns |
| settings | str | what the variant chose for itself, such as the best steps_per_execution |

The summary:

| field | type | meaning |
|---|---|---|
| bound | str | `input` or `step`: the slower of the two alone |
| bound_factor | float | how many times as fast the other is |
| text | str | the same in a sentence |
"""  # noqa: E501

import dataclasses
from collections.abc import Iterator, Sequence

from absl import flags

import pipelines
from pipelines import cli, tables
from trainer import config as config_lib

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
    "summary",
)

_NOT_COMPARED = (
    "augment",
    "loss",
    "label_smoothing",
    "class_weights",
    "l2",
    "regularizer",
    "metrics",
    "grad_accum_steps",
    "grad_clip_norm",
    "grad_clip_norm_per_variable",
    "grad_clip_value",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure. Field meanings: the help of the flag of that name."""

    compare: bool = False
    num_steps: int | None = None
    num_warmup_steps: int | None = None
    repeats: int = 5


def define_flags(values: flags.FlagValues) -> None:
    """Defines how to measure and where to write on `values`."""
    tables.define_flags(values)
    flags.DEFINE_boolean(
        "compare",
        False,
        "Also train the same through the loops people would write instead, and model.fit.",
        flag_values=values,
    )

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
    cli.tell_unused(values, _UNUSED_FLAGS)
    if settings.compare:
        cli.tell_unused(values, _NOT_COMPARED, "the loops compared with leave out of their steps")
    with tables.opened(values.output) as output:
        cli.import_tensorflow(values.verbosity)
        from trainer import speed

        rows = speed.measure(config, data_config, settings)
        tables.write_rows(rows, values.format, output, table)
    return 0


def table(rows: Sequence[tables.Row]) -> Iterator[str]:
    """The lines that people read."""
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
