"""Measures the input pipeline: python -m pipelines.benchmark --dataset=fashion_mnist

Takes the data and pipeline flags of training and measures input alone, without a model: the whole
pipeline as the training loop consumes it, and its stages, each together with all those before it.
Each is opened anew, warmed up, and timed in several turns, interleaved with those of the others.
The first variant's order, resuming and completeness are checked, and flags that should make it
faster are tried out before they are advised.

One row (JSON object, CSV line) for each stage of each variant, then a summary. All rows have:

| field | type | meaning |
|---|---|---|
| stage | str | `pipeline`: the whole; a stage's name: up to that stage; `one_batch`: the whole, taken batch by batch; `baseline:...`: see --baselines; `summary` |
| reader | str | the reader in use |
| cache_state | dict | `examples`: held in `memory` or read from `files`; `page_cache_share`: share (0..1) of the files that the system held in memory when measuring began, null if unknown |
| flags | dict | all data and pipeline flags of the variant |
| machine | dict | `cpu`, `cores`, `memory_gb`, `gpus` |
| versions | dict | python and packages |

All rows but the summary:

| field | type | meaning |
|---|---|---|
| variant | dict | the sweep's flags |
| examples_per_sec | float | examples by seconds, median of the turns |
| examples_per_sec_min | float | of the slowest turn |
| examples_per_sec_max | float | of the fastest turn |
| mb_per_sec | float | 10^6 bytes of the stage's elements per second |
| cpu_us_per_example | float | core-microseconds of this process per example, all threads |
| idle_cores | float | cores that no process used |
| first_batch_secs | float | seconds from opening to the first element; of the whole, building the graph included |
| peak_memory_mb | float | the most memory the process would hold with this variant alone, 10^6 bytes |
| batches | int | batches of a turn; a turn goes on to the end of its chunk |
| warmup_batches | int | batches before each turn, off the clock, the first element in any case |
| repeats | int | turns |
| examples | int | examples of a turn, as counted |

Stages and the whole, which has its last stage's:

| field | type | meaning |
|---|---|---|
| added_us_per_example | float | microseconds by the clock that the stage adds to those before it |
| added_cpu_us_per_example | float | core-microseconds that it adds: its cost |

`one_batch` and `baseline:...`:

| field | type | meaning |
|---|---|---|
| ratio | float | the pipeline's speed by this one's, of the medians |
| ratio_min | float | the least of one turn |
| ratio_max | float | the greatest of one turn |

The summary, about the first variant:

| field | type | meaning |
|---|---|---|
| limiting_stage | str or null | the stage that adds most time; null without stages |
| fastest_variant | dict | the sweep's flags that were fastest |
| advice | list | `flags`, `predicted_gain`, `measured_gain`, `measured_gain_min`, `measured_gain_max` (times as fast) and `same_batches` (whether training stays the same), best first |
| tried | list | the same of flags that did not help |
| graph_us_per_example | dict or null | thread time per node of the graph as TensorFlow rewrote it; null if it cannot tell |
| skipped_records | int | records met that could not be used |
| checks | dict or null | `visited`: how two epochs were visited, through the `pipeline` or by the `order` alone; `epoch_secs`: seconds of each, the first with the opening and all of a chunk that holds several, null by the order; `once`: `examples` of an epoch, `left_out`, `skipped_records`, `ok`: each once; `shuffle`: `file_order_corr`, `file_order_z`, `epochs_corr`, `epochs_z`, `kept_neighbours`, `parity_z`; `resume`: `step`, `exact`, `secs`, `secs_from_start`, `state_bytes` |
"""  # noqa: E501

import csv
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

import pipelines
from pipelines import DataConfig, UserError, cli, plots, tables

_UNUSED_FLAGS = ("eval_split", "eval_batch_size")
_NOT_SWEPT = (*_UNUSED_FLAGS, "download", "data_service")


def define_flags(values: flags.FlagValues) -> None:
    """Defines how to measure and where to write on `values`."""

    def integer(name, default, lower, text):
        flags.DEFINE_integer(name, default, text, lower_bound=lower, flag_values=values)

    def boolean(name, default, text):
        flags.DEFINE_boolean(name, default, text, flag_values=values)

    tables.define_flags(values)
    flags.DEFINE_string("plot", None, "PNG file to draw the rows to.", flag_values=values)
    flags.DEFINE_string(
        "sweep",
        None,
        "Measures all combinations: flag=v1,v2;flag=...; a value that holds commas in quotes.",
        flag_values=values,
    )
    integer("num_batches", None, 1, "Batches of a turn (default: those of about a second).")
    integer(
        "warmup_batches",
        None,
        0,
        "Batches before each turn, off the clock (default: more than can have been prepared "
        "before the clock starts).",
    )
    integer("repeats", 5, 1, "Turns of each row, interleaved with those of the others.")
    boolean("stages", True, "Also measure the stages.")
    boolean("to_device", False, "Also copy the batches to the GPUs, or the CPU, as training does.")
    boolean(
        "baselines",
        False,
        "Also measure one batch at a time, the pipelines people write instead (a naive one, its "
        "map as it is and parallel; the order of TFDS's performance guide), numpy, and how Keras "
        "reads arrays.",
    )
    boolean("checks", True, "Check order, resuming and completeness.")
    boolean("advice", True, "Look for flags that make it faster, and try them out.")


def main(argv: Sequence[str]) -> int:
    """Parses flags, measures, writes the rows; returns the exit code."""
    values = cli.parse_flags(argv, __doc__, pipelines.define_flags, define_flags)
    variants = variants_of(argv, values)
    cli.check_environment()
    cli.set_up_logging(values.verbosity)
    cli.tell_unused(values, _UNUSED_FLAGS)
    if values.plot is not None:
        plots.check("plot", values.plot)
    with tables.opened(values.output) as output:
        cli.import_tensorflow(values.verbosity)
        from pipelines import speed

        fields = [field.name for field in dataclasses.fields(speed.Settings)]
        settings = speed.Settings(**{name: values[name].value for name in fields})
        rows = speed.measure(variants, settings)
        tables.write_rows(rows, values.format, output, table)
    if values.plot:
        plots.benchmark_chart(rows, values.plot)
    return 0


def variants_of(
    argv: Sequence[str], values: flags.FlagValues
) -> list[tuple[dict[str, Any], DataConfig]]:
    """All combinations of the sweep as (flags of the sweep, all data flags).

    Raises:
      UserError: for a sweep that is no sweep, an unknown flag, or a value that a flag refuses.
    """
    swept = parse_sweep(values.sweep or "")
    found = []
    for combination in itertools.product(*swept.values()):
        texts = [f"--{name}={text}" for name, text in zip(swept, combination, strict=True)]
        try:
            its_values = cli.parse_flags(
                [*argv, *texts], __doc__, pipelines.define_flags, define_flags
            )
            config = pipelines.config_from_flags(its_values)
        except UserError as error:
            raise UserError(f"--sweep={values.sweep}: {error}" if swept else str(error)) from None
        found.append(({name: its_values[name].value for name in swept}, config))
    return found


def parse_sweep(text: str) -> dict[str, list[str]]:
    """Takes `flag=v1,v2;flag=...` apart.

    Raises:
      UserError: naming what is wrong with it.
    """
    known = flags.FlagValues()
    pipelines.define_flags(known)
    offers = sorted(set(known) - set(_NOT_SWEPT))
    swept = {}
    for part in filter(None, text.split(";")):
        name, equals, listed = part.strip().partition("=")
        name = name.strip().lstrip("-")
        if not equals:
            raise UserError(f"--sweep={text}: {part!r} is not flag=value,value")
        if name not in offers:
            raise UserError(
                f"--sweep={text}: no flag {name!r} to sweep; there are {', '.join(offers)}"
            )
        if name in swept:
            raise UserError(f"--sweep={text}: {name!r} is named twice")
        try:
            swept[name] = next(csv.reader([listed], strict=True)) or [""]
        except csv.Error as error:
            raise UserError(f"--sweep={text}: {listed!r} is no list: {error}") from None
        if len(set(swept[name])) < len(swept[name]):
            raise UserError(f"--sweep={text}: {name!r} takes a value twice")
    return swept


# For people.


def table(rows: Sequence[tables.Row]) -> Iterator[str]:
    """The lines of a table, and what to conclude from it."""
    *rows, summary = rows
    names = [plots.bar_name(row) for row in rows]
    width = max(map(len, names))
    yield (
        f"{'stage':{width}}  {'examples/s':>11}  {'min .. max':^23}  {'MB/s':>8}  "
        f"{'core-µs/ex.':>11}  {'added':>8}  {'first s':>7}  {'peak MB':>7}  ratio"
    )
    for name, row in zip(names, rows, strict=True):
        added = row.get("added_cpu_us_per_example")
        yield (
            f"{name:{width}}  {row['examples_per_sec']:11,.0f}  "
            f"{row['examples_per_sec_min']:11,.0f} {row['examples_per_sec_max']:11,.0f}  "
            f"{row['mb_per_sec']:8,.1f}  {row['cpu_us_per_example']:11,.2f}  "
            f"{'' if added is None else f'{added:,.2f}':>8}  {row['first_batch_secs']:7.2f}  "
            f"{row['peak_memory_mb']:7,.0f}" + (f"  {row['ratio']:.2f}" if "ratio" in row else "")
        )
    yield from conclusions(summary)


def conclusions(summary: tables.Row) -> Iterator[str]:
    """The summary in sentences."""
    if summary["limiting_stage"]:
        yield f"limiting stage: {summary['limiting_stage']}"
    graph = summary["graph_us_per_example"]
    if graph:
        node = max(graph, key=graph.get)
        yield (
            f"TensorFlow's own account of the rewritten graph: {sum(graph.values()):,.2f} "
            f"thread-µs per example, {100 * graph[node] / sum(graph.values()):.0f}% of it in {node}"
        )
    if len(summary["fastest_variant"]):
        yield f"fastest variant: {_flags(summary['fastest_variant'])}"
    for told in summary["advice"]:
        yield f"advice: {_told(told)}" + ("" if told["same_batches"] else "; changes the batches")
    if not summary["advice"] and summary["tried"]:
        yield f"advice: none; tried in vain: {'; '.join(map(_told, summary['tried']))}"
    if summary["checks"]:
        yield from _checks(**summary["checks"])


def _flags(named: dict[str, Any]) -> str:
    return " ".join(f"--{name}={value}" for name, value in named.items())


def _told(told: dict[str, Any]) -> str:
    return (
        f"{_flags(told['flags'])}: {told['measured_gain']:.2f} times as fast measured "
        f"({told['measured_gain_min']:.2f} .. {told['measured_gain_max']:.2f}), "
        f"{told['predicted_gain']:.2f} predicted"
    )


def _checks(
    visited: str, epoch_secs: list[float] | None, once: dict, shuffle: dict, resume: dict
) -> Iterator[str]:
    how = "read through the pipeline" if visited == "pipeline" else "by the order alone"
    yield (
        f"every example once: {'yes' if once['ok'] else 'NO'} ({once['examples']:,} an epoch, "
        f"{once['left_out']:,} left out, two epochs {how})"
    )
    if epoch_secs:
        yield "seconds of the first epoch and the next: {:.2f}, {:.2f}".format(*epoch_secs)
    yield (
        f"shuffle: correlation with file order {shuffle['file_order_corr']:+.4f} "
        f"(|z| {shuffle['file_order_z']:.1f}), between epochs {shuffle['epochs_corr']:+.4f} "
        f"(|z| {shuffle['epochs_z']:.1f}), parity |z| {shuffle['parity_z']:.1f}, "
        f"{shuffle['kept_neighbours']} neighbours kept"
    )
    yield (
        f"resume at step {resume['step']:,}: {'exact' if resume['exact'] else 'NOT EXACT'}, "
        f"{resume['secs']:.3f} s to the first chunk "
        f"({resume['secs_from_start']:.3f} s from step 0), {resume['state_bytes']} bytes of state"
    )


if __name__ == "__main__":
    cli.run(main)
