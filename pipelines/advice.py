"""Flags that may make a pipeline faster: predicted from its figures, then put to the test."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from pipelines.config import DataConfig

MIN_GAIN = 1.05
_MAX_TRIED = 5
_MAX_PREDICTED = 100.0  # what costs nothing but what would be saved does not become free
_IDLE = 1.3  # cores that could do this many times as much are waiting for something
_PIXEL_STAGES = ("decode", "augment", "resize")
_MIN_SIDE = 64
_DECODING = 0.5  # share of the decode stage of images that vary in size; the rest crops and resizes
_OTHER_READER = {"stream": "indexed", "indexed": "stream"}

# Takes configurations; returns the examples per second of several interleaved turns of each.
RatesFn = Callable[[list[DataConfig], int], list[list[float]]]


@dataclasses.dataclass(frozen=True)
class Findings:
    """What was measured of one pipeline.

    Attributes:
      config: its flags.
      reader: name of the reader it uses.
      cores: cores this process may use.
      cpu_us_per_example: core-microseconds of the whole.
      added_cpu_us: core-microseconds per example that each stage adds.
      headroom: how many times as much it would do if it used the cores that idled, at least 1.
      chunk_steps: batches in one element.
      fits_in_memory: whether the memory reader could hold the split.
      varying: whether images vary in size, and are cropped and resized even if held decoded.
    """

    config: DataConfig
    reader: str
    cores: int
    cpu_us_per_example: float
    added_cpu_us: dict[str, float]
    headroom: float
    chunk_steps: int
    fits_in_memory: bool
    varying: bool = False

    def without(self, micros: float) -> float:
        """How many times as fast it would be with `micros` less to do for each example."""
        cost = self.cpu_us_per_example
        return cost / max(cost / _MAX_PREDICTED, cost - max(0.0, micros))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Flags that may help.

    Attributes:
      flags: flag -> value.
      predicted_gain: how many times as fast, at best.
      same_batches: whether training stays the same, example for example.
    """

    flags: dict[str, Any]
    predicted_gain: float
    same_batches: bool = True

    def applied_to(self, config: DataConfig) -> DataConfig:
        """The configuration that these flags make of `config`."""
        return dataclasses.replace(config, **{k: v or None for k, v in self.flags.items()})


def candidates(found: Findings) -> list[Candidate]:
    """What is worth trying, the most promising first; nothing for synthetic data."""
    if found.config.use_synthetic_data:
        return []
    ideas = [
        _parallel_calls(found),
        _prefetch(found),
        _reader(found),
        _batch_size(found),
        _image_size(found),
    ]
    worthwhile = [idea for idea in ideas if idea and idea.predicted_gain >= MIN_GAIN]
    return sorted(worthwhile, key=lambda idea: -idea.predicted_gain)[:_MAX_TRIED]


def _parallel_calls(found: Findings) -> Candidate | None:
    calls = found.config.num_parallel_calls
    if calls and calls != found.cores:
        gain = min(found.headroom, found.cores / calls) if calls < found.cores else found.headroom
        return Candidate({"num_parallel_calls": 0}, gain)
    if found.headroom < _IDLE:
        return None
    return Candidate({"num_parallel_calls": 4 * found.cores}, found.headroom)


def _prefetch(found: Findings) -> Candidate | None:
    if found.config.prefetch_batches:
        return Candidate({"prefetch_batches": 0}, found.headroom)
    if found.headroom < _IDLE:
        return None
    return Candidate({"prefetch_batches": 8 * found.chunk_steps}, found.headroom)


def _reader(found: Findings) -> Candidate | None:
    if found.reader == "memory":
        return None
    to = "memory" if found.fits_in_memory else _OTHER_READER.get(found.reader)
    gain = found.headroom
    if to == "memory":
        cost = found.added_cpu_us.get
        decoding = cost("decode", 0.0) * (_DECODING if found.varying else 1)
        gain = max(gain, found.without(cost("read", 0.0) + decoding))
    # Only windows make another order.
    same = not found.config.shuffle or "stream" not in (found.reader, to)
    return to and Candidate({"reader": to}, gain, same)


def _batch_size(found: Findings) -> Candidate | None:
    """A chunk of many batches that is still small costs much for each example in it."""
    if found.chunk_steps < 2:
        return None
    per_element = found.added_cpu_us.get("order", 0.0)
    factor = 4
    saved = per_element * (1 - 1 / factor)
    return Candidate({"batch_size": found.config.batch_size * factor}, found.without(saved), False)


def _image_size(found: Findings) -> Candidate | None:
    side = found.config.image_size
    if not side or side <= _MIN_SIDE:
        return None
    smaller = max(_MIN_SIDE, round(side * 0.75 / 32) * 32)
    pixels = sum(found.added_cpu_us.get(stage, 0.0) for stage in _PIXEL_STAGES)
    return Candidate(
        {"image_size": smaller}, found.without(pixels * (1 - (smaller / side) ** 2)), False
    )


def try_out(
    base: DataConfig, ideas: list[Candidate], rates_fn: RatesFn, repeats: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measures what each idea really gains, and once more for those that seem to help.

    The second measurement is the one that is told: the first chose, and choice flatters.

    Args:
      base: the flags as they are.
      ideas: what to try.
      rates_fn: measures configurations next to each other.
      repeats: turns of the second measurement.

    Returns:
      (advice, what was tried in vain), each a list of dictionaries `flags`, `predicted_gain`,
      `measured_gain`, `measured_gain_min`, `measured_gain_max`, `same_batches`, best first.
    """
    helpful, vain = [], []
    first = _gains(base, ideas, rates_fn, max(2, repeats // 2))
    for idea, gains in zip(ideas, first, strict=True):
        (helpful if _helps(gains) else vain).append((idea, gains))
    confirmed = _gains(base, [idea for idea, _ in helpful], rates_fn, repeats)
    advised = []
    for (idea, _), gains in zip(helpful, confirmed, strict=True):
        (advised if _helps(gains) else vain).append((idea, gains))
    return tuple(
        sorted((_told(*pair) for pair in pairs), key=lambda told: -told["measured_gain"])
        for pairs in (advised, vain)
    )


def _gains(base, ideas: list[Candidate], rates_fn: RatesFn, repeats: int) -> list[list[float]]:
    if not ideas:
        return []
    ours, *others = rates_fn([base, *(idea.applied_to(base) for idea in ideas)], repeats)
    return [[b / a for a, b in zip(ours, rates, strict=True)] for rates in others]


def _helps(gains: list[float]) -> bool:
    """A gain worth a flag in the median, and a gain at all in three turns of four."""
    turns = sorted(gains)
    return statistics.median(turns) >= MIN_GAIN and turns[len(turns) // 4] > 1.0


def _told(idea: Candidate, gains: list[float]) -> dict[str, Any]:
    return {
        "flags": idea.flags,
        "predicted_gain": idea.predicted_gain,
        "measured_gain": statistics.median(gains),
        "measured_gain_min": min(gains),
        "measured_gain_max": max(gains),
        "same_batches": idea.same_batches,
    }
