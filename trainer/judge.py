"""Judges evaluations: which is the best, and whether training should stop."""

import dataclasses
import math
import re
from collections.abc import Collection
from typing import Any

from pipelines import UserError
from trainer.config import TrainConfig, parse_target
from trainer.report import FIELDS

_LOWER_IS_BETTER = re.compile(r"loss|mse|mae|error|perplexity", re.IGNORECASE)


@dataclasses.dataclass
class Standing:
    """How a run's evaluations have gone so far; saved with each checkpoint.

    Attributes:
      last: the newest evaluation row.
      best: the best one.
      evals_without_gain: evaluations since then.
      stop_reason: why training should stop, None as long as it should not.
    """

    last: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    evals_without_gain: int = 0
    stop_reason: str | None = None


class Judge:
    """Compares evaluations by --best_metric, and ends a run by patience or --target_metric."""

    def __init__(self, config: TrainConfig, default_metric: str, lower_is_better: Collection[str]):
        """Takes what a task prefers beside what the flags say; see `Task`."""
        self._metric = config.best_metric or default_metric
        by_name = bool(_LOWER_IS_BETTER.search(self._metric))
        self._lower_is_better = by_name or self._metric in lower_is_better
        self._patience = config.early_stopping_patience
        self._target = config.target_metric

    def check_names(self, names: Collection[str]) -> None:
        """Refuses metrics that are not among the `names` that an evaluation yields.

        Raises:
          UserError: naming flag, metric and what there is.
        """
        target = self._target and parse_target(self._target)[0]
        for flag, name in (("best_metric", self._metric), ("target_metric", target)):
            if name and name not in names:
                known = ", ".join(n for n in names if n not in FIELDS)
                raise UserError(f"--{flag}={name}: evaluation yields {known}")

    def judge(self, row: dict[str, Any], standing: Standing) -> bool:
        """Takes a new evaluation into account; returns whether it is the best so far."""
        self.check_names(row)
        standing.last = row
        is_best = standing.best is None or self._is_better(row, standing.best)
        if is_best:
            standing.best, standing.evals_without_gain = row, 0
        else:
            standing.evals_without_gain += 1
        standing.stop_reason = self.reason_to_stop(standing)
        return is_best

    def _is_better(self, row: dict[str, Any], best: dict[str, Any]) -> bool:
        new, old = row[self._metric], best[self._metric]
        if math.isnan(old):
            return True
        return new < old if self._lower_is_better else new > old

    def reason_to_stop(self, standing: Standing) -> str | None:
        """Why training should stop after its last evaluation, None if it should not.

        Raises:
          UserError: for a target that the evaluation does not know.
        """
        row = standing.last
        if row is None:
            return None
        self.check_names(row)
        if self._patience and standing.evals_without_gain >= self._patience:
            return f"{self._patience} evaluations without a better result"
        if self._target:
            name, sign, value = parse_target(self._target)
            if row[name] >= value if sign == ">=" else row[name] <= value:
                return f"{name} reached {self._target}"
        return None
