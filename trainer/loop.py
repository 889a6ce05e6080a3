"""The outer loop: compiled calls from one boundary to the next, and what happens at boundaries."""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from pipelines import Pipeline, UserError
from trainer.checkpoint import CheckpointStore
from trainer.clock import Clock
from trainer.config import TrainConfig
from trainer.evaluation import Evaluator, skipped
from trainer.judge import Judge, Standing
from trainer.report import Report, describe
from trainer.signals import StopRequest
from trainer.step import Outcome, Stepper
from trainer.storage import WRITE_ERRORS, Outage, reason
from trainer.tasks.base import Task

_log = logging.getLogger(__name__)

_CALL_SECS = 0.5  # a signal is answered between calls, so a call stays short
_MIN_CHECKPOINT_GAP_SECS = 1.0


class NotFinite(Exception):
    """A loss or gradient was not finite at `step`."""

    def __init__(self, step: int, variable: str):
        super().__init__(f"step {step}: loss or gradient is not finite, first in {variable}")
        self.step, self.variable = step, variable


@dataclasses.dataclass
class Progress:
    """What the host knows about a run beside its variables; saved with each checkpoint."""

    standing: Standing = dataclasses.field(default_factory=Standing)
    total_steps: int = 0
    rollbacks: int = 0
    train_examples: float = 0.0

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**state, "standing": Standing(**state["standing"])})


class Loop:
    """Trains a task to the end, evaluating, reporting and saving on the way.

    Attributes:
      step: finished training steps.
      progress: see `Progress`.
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        stepper: Stepper,
        train: Pipeline | None,
        evaluator: Evaluator | None,
        report: Report,
        clock: Clock,
        stop: StopRequest,
        save_fn: Callable[[CheckpointStore, int, dict[str, Any]], None],
        checkpoints: CheckpointStore,
        best: CheckpointStore,
        callback: Callable[[str, "Loop"], None] | None = None,
    ):
        self.config, self.task, self.stepper = config, task, stepper
        self.train_pipeline = self._given_pipeline = train
        self.report, self.clock, self.stop = report, clock, stop
        self._save_fn, self._checkpoints, self._best = save_fn, checkpoints, best
        self._callback = callback or (lambda event, loop: None)
        self.step = 0
        self._evaluator = evaluator
        self._judge = Judge(config, task.best_metric, task.lower_is_better)
        self.progress = Progress(total_steps=task.total_steps)
        self._saved_step: int | None = None
        self._outages = {store: Outage() for store in (checkpoints, best)}
        self._saved_at = time.monotonic()
        self._call_steps = 1
        self._chunks: _Chunks | None = None
        self._outcome: Outcome | None = None
        self._profiling = False

    # State.

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the host's side."""
        return {"progress": dataclasses.asdict(self.progress), "clock": self.clock.state()}

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint whose variables are restored."""
        self.step = self._saved_step = step
        self.progress = Progress.from_state(state["progress"])
        self._best.protected = self._best_step()
        self.clock.restore(state["clock"])
        if self.config.training:  # by other flags it may stop elsewhere now
            standing, total_steps = self.progress.standing, self.task.total_steps
            same_end = self.progress.total_steps == total_steps
            standing.stop_reason = self._judge.reason_to_stop(standing) if same_end else None
            self.progress.total_steps = total_steps
        self._use_data_order_of_rollback()

    def roll_back(self, rollbacks: int) -> None:
        """After a restore: trains on in another data order, counted by `rollbacks`."""
        self.progress.rollbacks = rollbacks
        self._use_data_order_of_rollback()

    def _use_data_order_of_rollback(self) -> None:
        self._chunks = None
        if self.progress.rollbacks:
            self.train_pipeline = self._given_pipeline.reseeded(self.progress.rollbacks)

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train."""
        return self.step >= self.task.total_steps or self.progress.standing.stop_reason is not None

    # Training.

    def train(self) -> None:
        """Trains to the end.

        Raises:
          Stopped: after a signal, with a checkpoint of the current step saved.
          NotFinite: when loss or gradient are not.
          UserError: when the last checkpoint cannot be written.
        """
        self._callback("begin", self)
        if self.progress.standing.stop_reason:
            _log.info("nothing to train: %s", self.progress.standing.stop_reason)
        with self._progress_bar() as bar, self._profiler():
            self._stop_if_asked()
            if self.evaluates_first:
                self._evaluate_and_judge()
            while not self.finished:
                bar.update(self.advance())
                self._callback("step", self)
                self._stop_if_asked()
        self._save(last=True)
        self._callback("end", self)

    def advance(self) -> int:
        """Makes one compiled call and what is due after it; returns the steps taken."""
        if self._chunks is None:
            self._chunks = _Chunks(self.train_pipeline, self.step)
        count = self._run_call(self._chunks)
        self._at_boundary()
        return count

    def _run_call(self, chunks: "_Chunks") -> int:
        """Trains up to the next boundary, as far as one call reaches; returns the steps taken."""
        start = time.perf_counter()
        with self.clock.timing("train"):
            with self.clock.timing("input"):
                chunk, first, available = chunks.current()
            limit = self.config.steps_per_loop or self._call_steps
            count = min(available, limit, self._steps_to_boundary())
            self._outcome = self.stepper.train(chunk, first, count)
            bad_step = int(self._outcome.bad_step)
        chunks.advance(count)
        self.step += count
        if bad_step >= 0:
            raise NotFinite(bad_step, self._first_bad_variable())
        secs_per_step = (time.perf_counter() - start) / count
        reachable = max(1, int(_CALL_SECS / max(secs_per_step, 1e-9)))
        self._call_steps = min(reachable, 2 * self._call_steps)
        return count

    def _steps_to_boundary(self) -> int:
        stops = [self.task.total_steps - self.step]
        intervals = [self.config.log_steps, self._eval_every, self._checkpoint_every]
        stops += [every - self.step % every for every in intervals if every]
        if self.config.profile_steps:
            first, last = self.config.profile_steps
            stops += [edge - self.step for edge in (first - 1, last) if edge > self.step]
        return min(stops)

    def _at_boundary(self) -> None:
        last = self.step >= self.task.total_steps
        if self.step % self.config.log_steps == 0 or last:
            self._log_row()
        if self._evaluation_is_due():
            self._evaluate_and_judge()
            if (
                self.progress.standing.stop_reason
                and not last
                and self.step % self.config.log_steps
            ):
                self._log_row()
        if self._checkpoint_due():
            self._save()
        if self.config.profile_steps:
            first, end = self.config.profile_steps
            self._set_profiling(first - 1 <= self.step < end)

    def _evaluation_is_due(self) -> bool:
        if not self._eval_every:
            return False
        if self.step == 0:
            return self.task.evaluates_untrained
        return self.step >= self.task.total_steps or self._is_due(self._eval_every)

    def _is_due(self, every: int | None) -> bool:
        return bool(every) and self.step > 0 and self.step % every == 0

    @property
    def _eval_every(self) -> int | None:
        if self.config.mode != "train_and_eval":
            return None
        return self.config.eval_steps or (self.config.eval_epochs or 1) * self.task.steps_per_epoch

    @property
    def _checkpoint_every(self) -> int | None:
        if self.config.checkpoint_steps:
            return self.config.checkpoint_steps
        return None if self.config.checkpoint_secs is not None else self.task.steps_per_epoch

    def _checkpoint_due(self) -> bool:
        waited = time.monotonic() - self._saved_at
        secs = self.config.checkpoint_secs
        if secs is not None and waited >= secs:
            return True
        if not self._is_due(self._checkpoint_every):
            return False
        return bool(self.config.checkpoint_steps) or waited >= _MIN_CHECKPOINT_GAP_SECS

    def _stop_if_asked(self) -> None:
        if self.stop.signum is not None:
            self._set_profiling(False)
            self._save(last=True)
            _log.info("stopped by a signal at step %d, saved", self.step)
            self.stop.raise_if_received()

    def _save(self, last: bool = False) -> None:
        if self._saved_step == self.step:
            return
        with self.clock.timing("checkpoint"):
            self.report.flush()
            if self._write(self._checkpoints, last):
                self._saved_step = self.step
                self._best.settle(self._best_step())
        self._saved_at = time.monotonic()

    def _best_step(self) -> int | None:
        best = self.progress.standing.best
        return best and best["step"]

    def _write(self, store: CheckpointStore, last: bool = False) -> bool:
        """Writes a checkpoint; returns whether it could be. A run goes on without all but the last.

        Raises:
          UserError: if it is the last that cannot be written.
        """
        path = store.folder / f"ckpt-{self.step}"
        try:
            self._save_fn(store, self.step, self.state())
        except WRITE_ERRORS as error:
            if last:
                raise UserError(
                    f"{path}, the last checkpoint, cannot be written: {reason(error)}; run it "
                    "again to go on from the one before"
                ) from error
            self._outages[store].failed(path, error, "training goes on, the one before stays")
            return False
        self._outages[store].succeeded(path)
        return True

    def _first_bad_variable(self) -> str:
        for model in self.task.models.values():
            for variable in model.trainable_variables:
                if not np.isfinite(variable.numpy()).all():
                    return variable.path
        return "the loss (all variables are finite)"

    # Reports.

    def _log_row(self) -> None:
        means, counts = self.stepper.train_sums.read(self._outcome.sums)
        self.stepper.train_sums.reset()
        examples = counts.pop("examples", 0.0)
        means.pop("examples", None)
        secs = self.clock.window("train")
        self.progress.train_examples += examples
        row = {
            "split": "train",
            "step": self.step,
            "epoch": self.step / self.task.steps_per_epoch,
            "loss": sum(means.get(f"{u.prefix}loss", math.nan) for u in self.task.updates),
            **means,
            **self._norms_and_rates(),
            "examples": round(examples),
            "seconds": secs,
            "examples_per_sec": examples / secs if secs else 0.0,
            "input_wait": self.clock.window("input") / secs if secs else 0.0,
            **self._overflows(),
            **skipped(self.train_pipeline),
        }
        self.clock.start_window()
        self.report.write(row)
        if not math.isfinite(row["loss"]) and examples:
            _log.warning("step %d: the loss since the row before is not finite", self.step)
        _log.info("%s", describe(row, self.task.total_steps))

    def _norms_and_rates(self) -> dict[str, float]:
        """Of each update: norm of the weights, of the last step's change by it, learning rate."""
        outcome = self._outcome
        columns = (outcome.weight_norms, outcome.change_norms, outcome.rates)
        table = zip(self.task.updates, *(c.numpy().tolist() for c in columns), strict=True)
        values = {}
        for update, norm, change, rate in table:
            values[f"{update.prefix}weight_norm"] = norm
            values[f"{update.prefix}update_ratio"] = change / norm if norm else 0.0
            values[f"{update.prefix}learning_rate"] = rate
        return values

    def _overflows(self) -> dict[str, int]:
        if not self.stepper.scales:
            return {}
        total = sum(int(s.overflow_steps.numpy()) for s in self.stepper.scales.values())
        return {"overflow_steps": total}

    @contextlib.contextmanager
    def _progress_bar(self) -> Iterator[tqdm]:
        disable = {"auto": None, "true": False, "false": True}[self.config.progress]
        with tqdm(
            total=self.task.total_steps,
            initial=self.step,
            unit="step",
            desc="training",
            disable=disable,
            dynamic_ncols=True,
            leave=False,
        ) as bar:
            yield bar

    @contextlib.contextmanager
    def _profiler(self) -> Iterator[None]:
        """Ends what `_set_profiling` began, however training ends."""
        try:
            yield
        finally:
            self._set_profiling(False)

    def _set_profiling(self, on: bool) -> None:
        if on and not self._profiling:
            tf.profiler.experimental.start(str(self.report.events_dir))
        elif self._profiling and not on:
            tf.profiler.experimental.stop()
        self._profiling = on

    # Evaluation.

    def evaluate(self) -> dict[str, Any]:
        """Evaluates the whole split; returns the row, not yet written.

        Raises:
          Stopped: after a signal, with a checkpoint of the current step saved.
        """
        row = self._evaluator.evaluate(self.step)
        if row is None:
            if self.config.training:
                self._stop_if_asked()
            self.stop.raise_if_received()
        return row

    @property
    def evaluates_first(self) -> bool:
        """Whether an evaluation is due now: of the untrained, or the run was stopped in it."""
        row = self.progress.standing.last
        return self._evaluation_is_due() and (row is None or row["step"] != self.step)

    def check_metrics(self) -> None:
        """Refuses names of metrics that the evaluation, once traced, is known not to yield."""
        if type(self.task).finish_evaluation is Task.finish_evaluation:  # it may add others
            self._judge.check_names(self.stepper.eval_sums.names)

    def _evaluate_and_judge(self) -> None:
        row = self.evaluate()
        self.report.write(row)
        self._saved_step = None  # a checkpoint of this step may lack what follows
        _log.info("%s", describe(row, self.task.total_steps))
        standing = self.progress.standing
        if self._judge.judge(row, standing):
            with self.clock.timing("checkpoint"):
                self._write(self._best)
        if standing.stop_reason:
            _log.info("stopping at step %d: %s", self.step, standing.stop_reason)


class _Chunks:
    """Walks the training pipeline in calls shorter than a chunk."""

    def __init__(self, pipeline: Pipeline, first_step: int):
        self._iterator = pipeline.chunks(first_step)
        self._chunk, self._first, self._count = None, 0, 0

    def current(self) -> tuple[dict[str, tf.Tensor], int, int]:
        """(chunk, first unused batch in it, number of unused batches)."""
        if self._first == self._count:
            self._chunk, self._count = next(self._iterator)
            self._first = 0
        return self._chunk, self._first, self._count - self._first

    def advance(self, count: int) -> None:
        """Marks batches as used."""
        self._first += count
