"""What `pipelines.benchmark` measures: pipelines, their stages, and the rows that come of it."""

import contextlib
import dataclasses
import logging
import statistics
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipelines import advice, baselines, graph_model, machine, memory, quality
from pipelines.config import DataConfig
from pipelines.errors import UserError
from pipelines.measure import DeviceFeed, Length, Subject, Turn, take_turns
from pipelines.tables import Row, ratio, spread
from pipelines.variants import WHOLE, Variant, load, load_all

_log = logging.getLogger(__name__)

_SHARE_OF_FREE_MEMORY = 0.5


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure. Field meanings: the help of the flag of that name."""

    num_batches: int | None = None
    warmup_batches: int | None = None
    repeats: int = 5
    stages: bool = True
    to_device: bool = False
    baselines: bool = False
    checks: bool = True
    advice: bool = True

    @property
    def length(self) -> Length:
        """How long a turn is."""
        return Length(self.num_batches, self.warmup_batches)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A row to be: what it is called, what is measured, and of which variant."""

    stage: str
    subject: Subject
    variant: Variant
    last_stage: str | None = None  # of the whole: the stage that it is as well


def measure(wanted: Sequence[tuple[dict[str, Any], DataConfig]], settings: Settings) -> list[Row]:
    """Measures pipelines and their stages.

    Args:
      wanted: (flags of the sweep, all data flags) of each pipeline; the first one is the one that
        baselines, checks and advice are about.
      settings: how to measure.

    Returns:
      Rows as documented in `pipelines.benchmark`, the summary last.

    Raises:
      UserError: for data flags that cannot be honoured; told before anything is measured.
    """
    with contextlib.suppress(RuntimeError):  # this process has its devices already
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
    base_mb = machine.resident_mb()
    variants = load_all(wanted)
    context = {"machine": machine.machine(), "versions": machine.versions()}
    groups = [_entries(variant, settings) for variant in variants]
    first = variants[0]
    if settings.baselines:
        groups[0] += [
            _Entry(name, subject, first)
            for name, subject in baselines.subjects(first.config, first.pipeline).items()
        ]
    subjects = [entry.subject for group in groups for entry in group]
    all_turns = iter(take_turns(subjects, settings.length, settings.repeats))
    rows = []
    for variant, group in zip(variants, groups, strict=True):
        measured = [(entry, next(all_turns)) for entry in group]
        for row in _rows(measured, base_mb, settings):
            rows.append({**row, **_described(variant), **context})
    return [*rows, {**_summary(first, rows, settings), **_described(first), **context}]


def _described(variant: Variant) -> Row:
    return {
        "reader": variant.pipeline.reader.name,
        "cache_state": variant.cache_state,
        "flags": dataclasses.asdict(variant.config),
    }


def _entries(variant: Variant, settings: Settings) -> list[_Entry]:
    """The stages of a variant and the whole, which without a feed is also its last stage."""
    stages = variant.stages() if settings.stages else []
    if settings.to_device:
        entries = [_Entry(name, subject, variant) for name, subject in stages]
        return [*entries, _Entry(WHOLE, variant.whole(DeviceFeed()), variant)]
    entries = [_Entry(name, subject, variant) for name, subject in stages[:-1]]
    return [*entries, _Entry(WHOLE, variant.whole(), variant, stages[-1][0] if stages else None)]


# Rows.


def _rows(measured: list[tuple[_Entry, list[Turn]]], base_mb: float, settings) -> list[Row]:
    """The rows of one variant: stages with what they add, the whole, and others against it."""
    rows, previous, ours = [], None, None
    for entry, turns in measured:
        row = _row(entry, turns, base_mb, settings)
        if ours:
            row |= ratio([turn.rate for turn in ours], [turn.rate for turn in turns])
        else:
            row |= _added(turns, previous)
            previous = turns
        if entry.stage == WHOLE:
            ours = turns
        if entry.last_stage:
            rows.append({**row, "stage": entry.last_stage})
        rows.append(row)
    return rows


def _row(entry: _Entry, turns: list[Turn], base_mb: float, settings: Settings) -> Row:
    def median(value_fn) -> float:
        return statistics.median(map(value_fn, turns))

    variant, size = entry.variant, entry.subject.batch_size
    grown = max(turn.memory_mb for turn in turns)
    warmup = settings.warmup_batches
    if warmup is None:
        warmup = round(median(lambda turn: turn.warmup_examples) / size)
    return {
        "stage": entry.stage,
        "variant": variant.flags,
        **spread("examples_per_sec", [turn.rate for turn in turns]),
        "mb_per_sec": median(lambda turn: turn.rate * turn.bytes_per_example / 1e6),
        "cpu_us_per_example": median(lambda turn: turn.cpu_us),
        "idle_cores": median(lambda turn: turn.idle_secs / turn.secs),
        "first_batch_secs": median(lambda turn: turn.first_secs),
        "peak_memory_mb": base_mb + max(variant.load_mb, variant.held_mb + grown),
        "batches": settings.num_batches or round(median(lambda turn: turn.examples) / size),
        "warmup_batches": warmup,
        "repeats": len(turns),
        "examples": round(median(lambda turn: turn.examples)),
    }


def _added(turns: list[Turn], previous: list[Turn] | None) -> Row:
    """What a stage adds to those before it, each repeat compared with its own neighbours."""

    def added(value_fn) -> float:
        values = list(map(value_fn, turns))
        if previous is not None:
            values = [a - value_fn(b) for a, b in zip(values, previous, strict=True)]
        return statistics.median(values)

    return {
        "added_us_per_example": added(lambda turn: 1e6 / turn.rate),
        "added_cpu_us_per_example": added(lambda turn: turn.cpu_us),
    }


# The summary.


def _summary(first: Variant, rows: list[Row], settings: Settings) -> Row:
    wholes = [row for row in rows if row["stage"] == WHOLE]
    stages = _stages(first, rows, settings)
    names = {stage: row["added_us_per_example"] for stage, row in stages.items()}
    advised, vain, graph, checks = [], [], None, None
    if settings.advice:
        advised, vain = _advice(first, wholes[0], stages, settings)
    if settings.stages:
        pipeline = first.pipeline
        size = pipeline.chunking().chunk_steps * pipeline.batch_size
        graph = graph_model.node_costs(pipeline.dataset(), size)
    if settings.checks:
        checks = quality.check(first.pipeline, wholes[0]["examples_per_sec"])
    return {
        "stage": "summary",
        "limiting_stage": max(names, key=names.get) if names else None,
        "fastest_variant": max(wholes, key=lambda row: row["examples_per_sec"])["variant"],
        "advice": advised,
        "tried": vain,
        "graph_us_per_example": graph,
        "checks": checks,
        "skipped_records": first.pipeline.skipped_records,
    }


def _stages(first: Variant, rows: list[Row], settings: Settings) -> dict[str, Row]:
    """The rows of the stages that make up the first variant, the feed as the last one."""
    ours = [r for r in rows if r["variant"] == first.flags and "added_us_per_example" in r]
    stages = {row["stage"]: row for row in ours}
    whole = stages.pop(WHOLE)
    return {**stages, "to_device": whole} if settings.to_device and stages else stages


def _advice(
    first: Variant, whole: Row, stages: dict[str, Row], settings: Settings
) -> tuple[list[Row], list[Row]]:
    """Predicts from the figures, tries out, and returns (advice, what was tried in vain)."""
    used_cores = whole["cpu_us_per_example"] * whole["examples_per_sec"] / 1e6
    found = advice.Findings(
        config=first.config,
        reader=first.pipeline.reader.name,
        cores=whole["machine"]["cores"],
        cpu_us_per_example=whole["cpu_us_per_example"],
        added_cpu_us={name: row["added_cpu_us_per_example"] for name, row in stages.items()},
        headroom=1 + whole["idle_cores"] / used_cores,
        chunk_steps=first.pipeline.chunking().chunk_steps,
        fits_in_memory=_fits_in_memory(first),
        varying=first.pipeline.spec.varies_in_size,
    )
    loaded, ideas = {first.config: first}, []
    for idea in advice.candidates(found):
        config = idea.applied_to(first.config)
        try:
            loaded[config] = load(idea.flags, config, list(loaded.values()))
            ideas.append(idea)
        except UserError as error:
            _log.info("advice: %s cannot be tried: %s", idea.flags, error)

    def rates(configs: list[DataConfig], repeats: int) -> list[list[float]]:
        subjects = [loaded[config].whole() for config in configs]
        turns = take_turns(subjects, settings.length, repeats, "trying advice")
        return [[turn.rate for turn in its_turns] for its_turns in turns]

    return advice.try_out(first.config, ideas, rates, settings.repeats)


def _fits_in_memory(variant: Variant) -> bool:
    types = variant.pipeline.reader.types.values()
    row = sum(t.dtype.size * t.shape.num_elements() for t in types)
    room = _SHARE_OF_FREE_MEMORY * memory.free_memory_bytes()
    return row * variant.pipeline.num_examples < room
