"""Metrics as sums and counts, kept on the devices until someone reads them."""

import tensorflow as tf

from pipelines import UserError
from trainer.report import refuse_fields

_CAPACITY = 64
_OWN = ("grad_norm", "examples")  # fields of the rows that come from here


class MetricSums:
    """Weighted means of named values, accumulated over steps and replicas.

    A mean is a sum of weighted values over a sum of weights, never a mean of means. Both are
    float64 and live in one variable, so that a step pays one addition for all metrics.
    Create inside the strategy's scope; `add` and `commit` in a replica, `read` outside.
    """

    def __init__(self, name: str):
        self.variable = tf.Variable(
            tf.zeros([_CAPACITY, 2], tf.float64),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            name=name,
        )
        strategy = tf.distribute.get_strategy()
        self._parts = strategy.experimental_local_results(self.variable)
        self._zeros = tf.zeros([_CAPACITY, 2], tf.float64)
        self._slots: dict[str, int] = {}
        self._pending: dict[str, tuple[tf.Tensor, tf.Tensor]] = {}

    def add(self, name: str, values: tf.Tensor, weights: tf.Tensor) -> None:
        """Adds values [n] with weights [n] (or two scalars) to the mean called `name`."""
        if name not in _OWN:
            refuse_fields([name], "--task")
        weights = tf.cast(weights, tf.float32)
        values = tf.cast(values, tf.float32)
        if values.shape != weights.shape:
            raise UserError(
                f"metric {name!r} must be one value per example, shape {weights.shape}, not "
                f"{values.shape}"
            )
        total = tf.reduce_sum(values * weights)
        self._pending[name] = (total, tf.reduce_sum(weights))

    def commit(self) -> None:
        """Adds what `add` has gathered since the last commit to the variable."""
        updates = tf.scatter_nd(
            [[self._slot(name)] for name in self._pending],
            [tf.cast(tf.stack(pair), tf.float64) for pair in self._pending.values()],
            [_CAPACITY, 2],
        )
        self._pending.clear()
        self.variable.assign_add(updates)

    @property
    def names(self) -> list[str]:
        """What was added so far or, while a step is only traced, will be."""
        return list(self._slots)

    def _slot(self, name: str) -> int:
        if name not in self._slots and len(self._slots) == _CAPACITY:
            raise UserError(f"a task may report at most {_CAPACITY} metrics")
        return self._slots.setdefault(name, len(self._slots))

    def table(self) -> tf.Tensor:
        """float64 [_CAPACITY, 2]: sums and weights over all replicas; also while tracing."""
        return self.variable.read_value()

    def read(self, table: tf.Tensor | None = None) -> tuple[dict[str, float], dict[str, float]]:
        """({name: mean}, {name: sum of weights}) of what has a weight.

        Args:
          table: what `table` returned earlier; None: now.
        """
        rows = (self.table() if table is None else table).numpy()
        present = {name: rows[slot] for name, slot in self._slots.items() if rows[slot][1] > 0}
        means = {name: float(total / weight) for name, (total, weight) in present.items()}
        return means, {name: float(weight) for name, (_, weight) in present.items()}

    def reset(self) -> None:
        """Forgets all values."""
        for part in self._parts:  # at a fifth of the price of the whole
            part.assign(self._zeros, read_value=False)
