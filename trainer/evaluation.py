"""Evaluation: one pass over a whole split, with the weights that are to be judged."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from pipelines import Pipeline, UserError, call_symbol
from trainer.clock import Clock
from trainer.report import refuse_fields
from trainer.signals import StopRequest
from trainer.step import Stepper
from trainer.tasks.base import Task


class Evaluator:
    """Evaluates a task on every example of a split.

    Attributes:
      random_state: variables that evaluation must leave as it found them.
    """

    def __init__(
        self, task: Task, stepper: Stepper, pipeline: Pipeline, clock: Clock, stop: StopRequest
    ):
        self._task, self._stepper, self._pipeline = task, stepper, pipeline
        self._clock, self._stop = clock, stop
        self.random_state: list[tf.Variable] = []

    def evaluate(self, step: int) -> dict[str, Any] | None:
        """The evaluation row of `step`, not yet written; None if a signal came in between."""
        sums = self._stepper.eval_sums
        with (
            self._clock.timing("eval"),
            averaged_weights(self._task),
            unchanged(self.random_state),
        ):
            start = time.perf_counter()
            sums.reset()
            for chunk, count in self._pipeline.chunks(num_epochs=1):
                self._stepper.evaluate(chunk, count)
                if self._stop.signum is not None:
                    return None
            means, counts = sums.read()
            means.pop("examples", None)
            means = self._finish(means)
            secs = time.perf_counter() - start
        return {
            "split": "eval",
            "step": step,
            **means,
            "examples": round(counts.get("examples", 0.0)),
            "seconds": secs,
            "weights": "average" if uses_average(self._task) else "raw",
            "data": self._pipeline.name,
            **skipped(self._pipeline),
        }

    def _finish(self, means: dict[str, float]) -> dict[str, float]:
        """What the task makes of the means.

        Raises:
          UserError: if its own code fails, or yields what is no metric.
        """
        means = call_symbol("task", self._task.finish_evaluation, means)
        refuse_fields(means, "--task: finish_evaluation()")
        try:
            return {name: float(value) for name, value in means.items()}
        except (TypeError, ValueError) as error:
            raise UserError(f"--task: finish_evaluation() must return numbers: {error}") from error


def skipped(pipeline: Pipeline) -> dict[str, int]:
    """How many records were unusable, where there are any."""
    return {"skipped_records": pipeline.skipped_records} if pipeline.skipped_records else {}


def uses_average(task: Task) -> bool:
    """Whether evaluation and export use averaged weights."""
    return any(update.optimizer.use_ema for update in task.updates)


@contextlib.contextmanager
def unchanged(variables: list[tf.Variable]) -> Iterator[None]:
    """Gives variables their values back after what is done inside."""
    values = [variable.read_value() for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


@contextlib.contextmanager
def averaged_weights(task: Task) -> Iterator[None]:
    """Puts the weights' moving averages in their place inside, where --ema_decay keeps some."""
    averaging = [update for update in task.updates if update.optimizer.use_ema]
    raw = [[v.numpy() for v in update.variables] for update in averaging]
    for update in averaging:
        update.optimizer.finalize_variable_values(update.variables)
    try:
        yield
    finally:
        for update, values in zip(averaging, raw, strict=True):
            for variable, value in zip(update.variables, values, strict=True):
                variable.assign(value)
