"""The pipelines that a benchmark compares: loaded, each distinct data once, and made measurable."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from pipelines import machine, source
from pipelines.config import DataConfig
from pipelines.measure import Items, Subject
from pipelines.order import Order
from pipelines.pipeline import Pipeline, load_data

WHOLE = "pipeline"

_CHUNKS_AHEAD = 2  # what is prefetched if no flag says so
_OWN_FLAGS = (
    "batch_size",
    "num_parallel_calls",
    "prefetch_batches",
)  # a reader has no part in them

Feed = Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A pipeline to measure.

    Attributes:
      flags: the sweep's flags that make it, empty without a sweep.
      config: all its data flags.
      pipeline: loaded from them.
      cache_state: see `pipelines.benchmark`.
      load_mb: the most memory that loading took, on top of what the process held.
      held_mb: memory that it holds.
    """

    flags: dict[str, Any]
    config: DataConfig
    pipeline: Pipeline
    cache_state: dict[str, Any]
    load_mb: float
    held_mb: float

    @property
    def words(self) -> str:
        """The sweep's flags in one string."""
        return " ".join(f"{name}={value}" for name, value in self.flags.items())

    def whole(self, feed: Feed | None = None) -> Subject:
        """The chunks that the training loop takes, through the very method it takes them with."""
        return self._subject(WHOLE, self.pipeline.chunks, feed)

    def stages(self) -> list[tuple[str, Subject]]:
        """Each stage, with all those before it."""
        chunks = self.pipeline.chunks
        return [
            (name, self._subject(name, functools.partial(chunks, stage=name)))
            for name in self.pipeline.stage_names
        ]

    def _subject(self, name: str, chunks_fn: Callable[[], Items], feed: Feed | None = None):
        pipeline = self.pipeline

        def open_items() -> Items:
            step = 0
            for chunk, num_steps in chunks_fn():
                yield chunk, _num_examples(pipeline.order, step, num_steps)
                step += num_steps

        ahead = -(-(pipeline.prefetch_batches or 0) // pipeline.chunking().chunk_steps)
        calls = pipeline.reader.read_calls + pipeline.map_calls
        in_flight = (ahead or _CHUNKS_AHEAD) + calls + 1
        return Subject(f"{name} {self.words}", open_items, pipeline.batch_size, in_flight, feed)


def _num_examples(order: Order, step: int, num_steps: int) -> int:
    """Examples in steps [step, step + num_steps), without padding."""

    def before(step: int) -> int:
        epochs, steps = divmod(step, order.steps_per_epoch)
        rest = min(steps * order.batch_size, order.examples_per_epoch)
        return epochs * order.examples_per_epoch + rest

    return before(step + num_steps) - before(step)


def load_all(wanted: Sequence[tuple[dict[str, Any], DataConfig]]) -> list[Variant]:
    """Loads (flags of the sweep, all data flags) of each variant.

    Raises:
      UserError: for flags that cannot be honoured.
    """
    loaded = []
    for flags, config in wanted:
        loaded.append(load(flags, config, loaded))
    return loaded


def load(flags: dict[str, Any], config: DataConfig, loaded: Sequence[Variant]) -> Variant:
    """Loads one more variant, with the reader of one of `loaded` if it would be the same.

    Raises:
      UserError: for flags that cannot be honoured.
    """
    for other in loaded:
        pipeline = _sharing_reader(other, config)
        if pipeline:
            return dataclasses.replace(other, flags=flags, config=config, pipeline=pipeline)
    machine.reset_peak()
    before = machine.resident_mb()
    pipeline = load_data(config, evaluating=False, mixing=True).train
    load_mb, held_mb = machine.peak_mb() - before, machine.resident_mb() - before
    state = _cache_state(config, pipeline)
    return Variant(flags, config, pipeline, state, max(0.0, load_mb), max(0.0, held_mb))


def _sharing_reader(other: Variant, config: DataConfig) -> Pipeline | None:
    """The pipeline of `config` on the reader of another, if they read the same in the same way."""
    changes = {name: getattr(config, name) for name in _OWN_FLAGS}
    if dataclasses.replace(other.config, **changes) != config:
        return None
    size = changes.pop("batch_size")
    if size != other.pipeline.batch_size:
        order = dataclasses.replace(other.pipeline.order, batch_size=size)
        if order.window or order.steps_per_epoch == 0:
            return None  # a window depends on the batch; of too large a one, loading tells
        changes["order"] = order
    return dataclasses.replace(other.pipeline, **changes)


def _cache_state(config: DataConfig, pipeline: Pipeline) -> dict[str, Any]:
    held = pipeline.reader.name in ("memory", "synthetic")
    share = None
    if not config.use_synthetic_data:
        builder = source.open_builder(config)
        split, _ = source.choose_splits(builder, config, evaluating=False)
        paths = {stretch.path for stretch in source.stretches(builder, split)}
        share = machine.page_cache_share(sorted(paths))
    return {"examples": "memory" if held else "files", "page_cache_share": share}
