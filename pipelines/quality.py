"""Does a pipeline keep its promises: every example once, well shuffled, resumed exactly."""

import statistics
import time
from typing import Any

import numpy as np

from pipelines.pipeline import INDEX, WEIGHT, Pipeline

_EPOCHS = 2
_MAX_READ_SECS = 60.0
_RESUMES = 3


def check(pipeline: Pipeline, examples_per_sec: float) -> dict[str, Any]:
    """Visits two epochs and resumes when nine tenths of the first are over.

    The epochs are read as training reads them or, where that would take more than a minute, told by
    the order's arithmetic (`visited` says which).

    Args:
      pipeline: what to check.
      examples_per_sec: its measured speed.

    Returns:
      `visited` ("pipeline" or "order"), `epoch_secs`, `once`, `shuffle` and `resume`: see
      `pipelines.benchmark`.
    """
    order = pipeline.order
    late = order.steps_per_epoch * 9 // 10
    batch = epoch_secs = None
    if _EPOCHS * order.examples_per_epoch / examples_per_sec <= _MAX_READ_SECS:
        visited = "pipeline"
        epochs, epoch_secs, batch = _read(pipeline, late)
    else:
        visited = "order"
        epochs = [_without_padding(pipeline, epoch) for epoch in range(_EPOCHS)]
    return {
        "visited": visited,
        "epoch_secs": epoch_secs,
        "once": once(
            epochs, order.num_examples, order.examples_per_epoch, pipeline.skipped_records
        ),
        "shuffle": shuffle_scores(*epochs),
        "resume": _resume(pipeline, late, batch),
    }


def _read(
    pipeline: Pipeline, chosen: int
) -> tuple[list[np.ndarray], list[float], dict[str, np.ndarray]]:
    """Positions in order of visit and seconds of each epoch, and the batch of step `chosen`."""
    per_epoch, step, batch = pipeline.steps_per_epoch, 0, None
    epochs, ends = [[] for _ in range(_EPOCHS)], [time.perf_counter()]
    for chunk, num_steps in pipeline.chunks():
        index, weight = (chunk[key].numpy() for key in (INDEX, WEIGHT))
        for i in range(min(num_steps, _EPOCHS * per_epoch - step)):
            epochs[(step + i) // per_epoch].append(index[i][weight[i] > 0])
        if step <= chosen < step + num_steps:
            batch = {key: tensor[chosen - step].numpy() for key, tensor in chunk.items()}
        step += num_steps
        ends += [time.perf_counter()] * (min(step // per_epoch, _EPOCHS) - len(ends) + 1)
        if step >= _EPOCHS * per_epoch:
            return [np.concatenate(visits) for visits in epochs], np.diff(ends).tolist(), batch


def _without_padding(pipeline: Pipeline, epoch: int) -> np.ndarray:
    order = pipeline.order
    return order.epoch(epoch).numpy()[order.weights().numpy() > 0]


def once(
    epochs: list[np.ndarray], num_examples: int, per_epoch: int, num_skipped: int = 0
) -> dict[str, Any]:
    """Whether each epoch visits as many different examples as it should, each once.

    Args:
      epochs: positions visited in each epoch.
      num_examples: examples in the split.
      per_epoch: examples that an epoch visits.
      num_skipped: how many of them may be missing because their records cannot be used.
    """

    def is_ok(visits: np.ndarray) -> bool:
        inside = len(visits) > 0 and visits.min() >= 0 and visits.max() < num_examples
        complete = per_epoch - num_skipped <= len(visits) <= per_epoch
        return bool(inside and complete and len(np.unique(visits)) == len(visits))

    return {
        "examples": len(epochs[0]),
        "left_out": num_examples - per_epoch,
        "skipped_records": num_skipped,
        "ok": all(map(is_ok, epochs)),
    }


def shuffle_scores(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """How well two epochs are mixed. Of a perfect shuffle each |z| is below 3 but once in 370.

    Args:
      first, second: int64 [n], positions in the order of visit.

    Returns:
      `file_order_corr`: of place in the epoch with place in the files, and |z| of it;
      `epochs_corr`: of the places that an example has in the two epochs, and |z|;
      `kept_neighbours`: examples followed by their successor in the files, about 1 expected;
      `parity_z`: |z| of even positions falling on even places.
    """
    n = len(first)
    common = np.intersect1d(first, second)
    places = []
    for epoch in (first, second):
        place = np.empty(max(first.max(), second.max()) + 1, np.int64)
        place[epoch] = np.arange(len(epoch))
        places.append(place[common])
    file_order, epochs = _corr(np.arange(n), first), _corr(*places)
    agree = int(np.sum(first % 2 == np.arange(n) % 2))
    return {
        "file_order_corr": file_order,
        "file_order_z": abs(file_order) * np.sqrt(max(n - 1, 0)),
        "epochs_corr": epochs,
        "epochs_z": abs(epochs) * np.sqrt(max(len(common) - 1, 0)),
        "kept_neighbours": int(np.sum(np.diff(first) == 1)),
        "parity_z": abs(agree - n / 2) / (np.sqrt(n) / 2),
    }


def _corr(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1]) if len(a) > 1 else 0.0


def _resume(pipeline: Pipeline, step: int, expected: dict[str, np.ndarray] | None) -> dict:
    """Opens the pipeline at `step` and compares the first batch with that of an unbroken run."""
    secs = {first: [] for first in (0, step)}
    for _ in range(_RESUMES):
        for first, its_secs in secs.items():
            start = time.perf_counter()
            chunk, _ = next(pipeline.chunks(first))
            its_secs.append(time.perf_counter() - start)
    batch = {key: tensor[0].numpy() for key, tensor in chunk.items()}
    if expected is None:
        real = batch[WEIGHT] > 0
        exact = batch[INDEX][real].tolist() == pipeline.order.batch(step)
    else:
        exact = all(np.array_equal(batch[key], expected[key]) for key in expected)
    return {
        "step": step,
        "exact": exact,
        "secs": statistics.median(secs[step]),
        "secs_from_start": statistics.median(secs[0]),
        "state_bytes": np.int64(step).nbytes,  # the step is all that a checkpoint must hold
    }
