"""From the tape to the variables: gradients are summed over replicas, clipped, applied once.

Whatever decides something about a gradient (its norm, clipping, finiteness) looks at the sum over
all replicas, so that every replica decides alike and one replica alone decides the same.
"""

import dataclasses

import tensorflow as tf

from pipelines import WEIGHT, UserError
from trainer.config import TrainConfig
from trainer.sums import MetricSums
from trainer.tasks.base import Batch, Update

# Ten bits are more than gradients of most models need (Micikevicius et al. use 3 to 15), and few
# enough that those of a plain problem do not overflow in the first steps.
_INITIAL_SCALE = 2.0**10
_SCALE_GROWTH_STEPS = 2000


class LossScale:
    """Dynamic loss scale of one update (Micikevicius et al. 2018, section 3.2).

    Halves after an overflow, whose update is skipped, and doubles after 2,000 steps without one.
    Create in scope.
    """

    def __init__(self, name: str):
        self.value = _scalar(_INITIAL_SCALE, f"{name}_loss_scale")
        self.good_steps = _scalar(0, f"{name}_good_steps")
        self.overflow_steps = _scalar(0, f"{name}_overflow_steps")

    def grow(self) -> None:
        """After a finite gradient; call outside of replicas."""
        grown = tf.equal(self.good_steps + 1, _SCALE_GROWTH_STEPS)
        self.good_steps.assign(tf.where(grown, 0, self.good_steps + 1))
        self.value.assign(tf.where(grown, self.value * 2.0, self.value))

    def shrink(self) -> None:
        """After an overflow; call outside of replicas."""
        self.good_steps.assign(0)
        self.value.assign(tf.maximum(self.value / 2.0, 1.0))
        self.overflow_steps.assign_add(1)


def _scalar(value, name: str) -> tf.Variable:
    return tf.Variable(
        value,
        trainable=False,
        name=name,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


@dataclasses.dataclass(frozen=True)
class GradientSettings:
    """How gradients are made: see the flags of these names; `jit` compiles forward and backward."""

    accum_steps: int = 1
    clip_norm: float | None = None
    clip_norm_per_variable: float | None = None
    clip_value: float | None = None
    jit: bool = False

    @classmethod
    def from_config(cls, config: TrainConfig, jit: bool) -> "GradientSettings":
        return cls(
            config.grad_accum_steps,
            config.grad_clip_norm,
            config.grad_clip_norm_per_variable,
            config.grad_clip_value,
            jit,
        )


def reduced_gradients(
    update: Update,
    batch: Batch,
    total_weight: tf.Tensor,
    settings: GradientSettings,
    scale: LossScale | None,
    sums: MetricSums,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """The gradient of the global mean loss, the same on every replica; call in a replica.

    Args:
      update: what is optimised.
      batch: this replica's rows of the batch.
      total_weight: scalar, sum of the weights of the whole batch.
      settings: accumulation and clipping.
      scale: loss scale, None for none.
      sums: receives the loss, the update's values and the gradient's norm before clipping.

    Returns:
      (gradients of `update.variables`, clipped; scalar bool: whether all of them and this
      replica's losses are finite).
    """
    context = tf.distribute.get_replica_context()
    num_replicas = context.num_replicas_in_sync

    def forward_backward(batch, total_weight, factor):
        return _local_gradients(update, batch, total_weight, factor, settings, num_replicas)

    if settings.jit:
        forward_backward = tf.function(forward_backward, jit_compile=True)
    factor = scale.value.read_value() if scale else tf.constant(1.0)
    gradients, values, penalty = forward_backward(batch, total_weight, factor)
    if num_replicas > 1:
        gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
    if scale:
        gradients = [g / factor for g in gradients]
    norm = tf.linalg.global_norm(gradients)
    _report(sums, update, batch[WEIGHT], values, penalty, norm, num_replicas)
    finite = tf.math.is_finite(norm + tf.reduce_sum(values["loss"]) + penalty)
    return _clip(gradients, norm, settings), finite


def _local_gradients(update, batch, total_weight, factor, settings, num_replicas):
    """(this replica's share of the gradient, values per example, penalty), over accumulated parts.

    The parts are unrolled: the collectives of synchronised layers cannot run in a graph loop.
    """
    parts = [_part(batch, i, settings.accum_steps) for i in range(settings.accum_steps)]
    share = 1.0 / (num_replicas * settings.accum_steps)
    totals, all_values, penalty = None, [], tf.constant(0.0)
    for part in parts:
        with tf.GradientTape() as tape:
            losses, values = update.loss_fn(part)
            penalty = update.penalty_fn()
            target = tf.reduce_sum(losses * part[WEIGHT]) / total_weight + penalty * share
            target *= factor
        gradients = tape.gradient(target, [v.value for v in update.variables])
        gradients = _dense(update, gradients)
        totals = (
            gradients if totals is None else [a + b for a, b in zip(totals, gradients, strict=True)]
        )
        all_values.append({"loss": losses, **values})
    joined = {key: tf.concat([v[key] for v in all_values], 0) for key in all_values[0]}
    return totals, joined, penalty


def _part(batch: Batch, index: int, count: int) -> Batch:
    if count == 1:
        return batch
    rows = batch[WEIGHT].shape[0] // count
    return {key: tensor[index * rows : (index + 1) * rows] for key, tensor in batch.items()}


def _dense(update: Update, gradients: list) -> list[tf.Tensor]:
    missing = [v.path for v, g in zip(update.variables, gradients, strict=True) if g is None]
    if len(missing) == len(gradients):
        raise UserError(f"the loss of {update.name!r} depends on none of its variables")
    # A variable that the loss does not reach has the gradient 0.
    return [
        tf.zeros_like(v.value) if g is None else tf.convert_to_tensor(g)
        for v, g in zip(update.variables, gradients, strict=True)
    ]


def _clip(gradients: list, norm: tf.Tensor, settings: GradientSettings) -> list[tf.Tensor]:
    if settings.clip_value is not None:
        limit = settings.clip_value
        gradients = [tf.clip_by_value(g, -limit, limit) for g in gradients]
        norm = None
    if settings.clip_norm_per_variable is not None:
        gradients = [tf.clip_by_norm(g, settings.clip_norm_per_variable) for g in gradients]
        norm = None
    if settings.clip_norm is not None:
        gradients, _ = tf.clip_by_global_norm(gradients, settings.clip_norm, use_norm=norm)
    return gradients


def _report(sums, update, weights, values, penalty, norm, num_replicas) -> None:
    for name, per_example in values.items():
        if name == "loss":
            per_example = per_example + penalty
        sums.add(update.prefix + name, per_example, weights)
    # Each replica holds the same norm: together they count it once.
    sums.add(update.prefix + "grad_norm", norm, 1.0 / num_replicas)


def apply(update: Update, gradients: list[tf.Tensor]) -> None:
    """Lets the optimizer take one step with gradients that are already summed; call in a replica.

    Keras sums gradients over replicas inside `apply`. Ours are summed before clipping, so that step
    is taken out; should a version of Keras no longer have it, dividing by the number of replicas
    gives the same result at the price of a second reduction.
    """
    optimizer = update.optimizer
    if hasattr(optimizer, "_all_reduce_sum_gradients"):
        optimizer._all_reduce_sum_gradients = list
    else:
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        gradients = [g / replicas for g in gradients]
    optimizer.apply(gradients, update.variables)
