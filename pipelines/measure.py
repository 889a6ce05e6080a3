"""One stopwatch for everything that yields examples: turns, interleaved, after a warm-up."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from pipelines import machine
from pipelines.resources import num_cores

# Elements and the examples that count in each, without an end.
Items = Iterator[tuple[Any, int]]

_TURN_SECS = 1.0
_MIN_WARMUP_SECS = 0.1
# Parallel calls finish in bursts; over this many elements a burst more or less does not matter.
_MIN_ELEMENTS = 24


@dataclasses.dataclass(frozen=True)
class Subject:
    """Something that yields examples, to be measured.

    Attributes:
      name: names it on the progress bar.
      open_fn: starts it and returns its items; called anew for each turn, so that nothing of it
        works ahead while others have theirs.
      batch_size: examples that make a batch of it.
      elements_in_flight: elements that may have been prepared before they are asked for.
      feed: called with each element, and with None to wait until all elements have arrived.
      period: examples after which its work repeats, as the filling of a buffer does; a turn counts
        whole ones.
    """

    name: str
    open_fn: Callable[[], Items]
    batch_size: int
    elements_in_flight: int = 4
    feed: Callable[[Any], None] | None = None
    period: int = 1


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one turn measured.

    Attributes:
      examples, secs: on the clock.
      cpu_secs: core-seconds of all threads of this process.
      idle_secs: core-seconds that nobody used.
      first_secs: from opening to the first element.
      warmup_examples: taken before the clock started, those of the first element included.
      bytes_per_example: of the first element.
      memory_mb: the most this process grew by during the turn.
    """

    examples: int
    secs: float
    cpu_secs: float
    idle_secs: float
    first_secs: float
    warmup_examples: int
    bytes_per_example: float
    memory_mb: float

    @property
    def rate(self) -> float:
        """Examples per second."""
        return self.examples / self.secs

    @property
    def cpu_us(self) -> float:
        """Core-microseconds per example."""
        return self.cpu_secs * 1e6 / self.examples


@dataclasses.dataclass(frozen=True)
class Length:
    """How long a turn is; None: by time, long enough for a steady figure."""

    num_batches: int | None = None
    warmup_batches: int | None = None


def take_turns(
    subjects: list[Subject], length: Length, repeats: int, title: str = "measuring"
) -> list[list[Turn]]:
    """Measures each subject `repeats` times, interleaved so that drift hits all alike.

    Returns:
      The turns of each subject.
    """
    turns = [[] for _ in subjects]
    with tqdm(
        total=repeats * len(subjects), desc=title, unit="turn", disable=None, leave=False
    ) as bar:
        for _ in range(repeats):
            for subject, its_turns in zip(subjects, turns, strict=True):
                bar.set_postfix_str(subject.name)
                its_turns.append(take_turn(subject, length))
                bar.update()
    return turns


def take_turn(subject: Subject, length: Length) -> Turn:
    """Opens the subject, warms up, and times whole elements until the turn is long enough."""
    machine.reset_peak()
    memory = machine.resident_mb()
    start = time.perf_counter()
    items = subject.open_fn()
    element, warmup = next(items)
    opened = time.perf_counter()
    bytes_per_example = _num_bytes(element) / warmup
    feed = subject.feed or (lambda element: None)
    feed(element)
    warmup += _warm_up(items, feed, subject, length, warmup)
    feed(None)
    clock = _Clock()
    examples = _run(items, feed, subject, length)
    feed(None)
    return Turn(
        examples,
        *clock.read(),
        opened - start,
        warmup,
        bytes_per_example,
        max(0.0, machine.peak_mb() - memory),
    )


class _Clock:
    """Seconds by the clock, used by this process, and unused, from the making on."""

    def __init__(self):
        self._idle, self._cpu = machine.idle_secs(), time.process_time()
        self._wall = time.perf_counter()

    def read(self) -> tuple[float, float, float]:
        wall = time.perf_counter() - self._wall
        cpu = time.process_time() - self._cpu
        if self._idle is None:  # not told: what this process did not use
            return wall, cpu, max(0.0, num_cores() * wall - cpu)
        return wall, cpu, machine.idle_secs() - self._idle


def _warm_up(items: Items, feed, subject: Subject, length: Length, taken: int) -> int:
    """Takes the rest of the warm-up after its first `taken` examples; returns how many."""
    if length.warmup_batches is not None:
        return _take(items, feed, length.warmup_batches * subject.batch_size - taken, 0, 0.0)
    return _take(items, feed, 0, subject.elements_in_flight, _MIN_WARMUP_SECS)


def _run(items: Items, feed, subject: Subject, length: Length) -> int:
    if length.num_batches is not None:
        examples = _take(items, feed, length.num_batches * subject.batch_size, 1, 0.0)
    else:
        examples = _take(items, feed, 0, _MIN_ELEMENTS, _TURN_SECS)
    return examples + _take(items, feed, -examples % subject.period, 0, 0.0)


def _take(items: Items, feed, min_examples: int, min_elements: int, min_secs: float) -> int:
    """Takes elements until all three minima are reached; returns the examples in them."""
    examples = elements = 0
    start = time.perf_counter()
    while (
        examples < min_examples or elements < min_elements or time.perf_counter() - start < min_secs
    ):
        element, count = next(items)
        feed(element)
        examples += count
        elements += 1
    return examples


def _num_bytes(element: Any) -> int:
    """Bytes of all tensors or arrays of an element; of strings, their characters."""
    total = 0
    for part in tf.nest.flatten(element):
        array = np.asarray(part)
        strings = array.dtype == object
        total += sum(map(len, array.ravel())) if strings else array.nbytes
    return total


class DeviceFeed:
    """Copies each replica's contiguous rows of a chunk to its device, as training does.

    Attributes:
      devices: names of those it copies to; all GPUs, or the CPU where there is none.
      sent: copies made of the last chunk.
    """

    def __init__(self):
        logical = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")[:1]
        self.devices = [device.name for device in logical]
        self.sent: list[tf.Tensor] = []

    def __call__(self, chunk: dict[str, tf.Tensor] | None) -> None:
        """Sends a chunk of tensors [k, batch_size, ...] on its way; None: waits for the last."""
        if chunk is None:
            for tensor in self.sent:
                tf.reshape(tensor, [-1])[:1].numpy()  # can only be read once the copy is there
            return
        self.sent = []
        for replica, device in enumerate(self.devices):
            rows = self._rows(chunk, replica)
            with tf.device(device):
                self.sent += [tf.identity(tensor) for tensor in rows.values()]

    def _rows(self, chunk: dict[str, tf.Tensor], replica: int) -> dict[str, tf.Tensor]:
        if len(self.devices) == 1:
            return chunk
        with tf.device("cpu:0"):
            sizes = {key: tensor.shape[1] // len(self.devices) for key, tensor in chunk.items()}
            return {
                key: tensor[:, replica * sizes[key] : (replica + 1) * sizes[key]]
                for key, tensor in chunk.items()
            }
