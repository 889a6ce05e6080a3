"""The compiled loops: many training or evaluation steps over one chunk of batches in one call."""

import logging
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import tensorflow as tf

from pipelines import WEIGHT, UserError
from trainer import gradients as gradients_lib
from trainer import optim, replicas
from trainer.config import TrainConfig
from trainer.gradients import GradientSettings, LossScale
from trainer.sums import MetricSums
from trainer.tasks.base import Batch, Task

_log = logging.getLogger(__name__)

_NO_STEP = -1


def reason(error: Exception) -> str:
    """What went wrong in traced code: the last line before Keras lists the arguments."""
    told = str(error).partition("Arguments received by")[0].strip() or type(error).__name__
    line = re.sub(r"\x1b\[[\d;]*m", "", told.splitlines()[-1])
    return line.strip().removeprefix("UserError: ")


class Outcome(NamedTuple):
    """What a call of training steps tells the host: all in one, for reading is slow.

    Attributes:
      bad_step: int64, the first step whose loss or gradient was not finite, -1 for none.
      sums: `Stepper.train_sums` after the call, see `MetricSums.table`.
      rates: float32 [updates], learning rate of each update's last step.
      weight_norms: float32 [updates], global norm of the weights after the call.
      change_norms: float32 [updates], global norm of what the last step has added to them.
    """

    bad_step: tf.Tensor
    sums: tf.Tensor
    rates: tf.Tensor
    weight_norms: tf.Tensor
    change_norms: tf.Tensor


class Stepper:
    """Runs a task's steps on all replicas. Create inside the strategy's scope.

    Attributes:
      train_sums, eval_sums: metrics since they were last reset.
    """

    def __init__(self, task: Task, strategy: tf.distribute.Strategy, config: TrainConfig):
        self.task, self.strategy = task, strategy
        self.train_sums, self.eval_sums = MetricSums("train_sums"), MetricSums("eval_sums")
        self._share_keras_generator = replicas.share_keras_generator()
        self.scales: dict[str, LossScale] = {}
        if config.mixed_precision_policy == "mixed_float16":
            self.scales = {update.name: LossScale(update.name) for update in task.updates}
        one_replica = strategy.num_replicas_in_sync == 1
        jit = choose_jit(config.jit_compile, task, strategy.num_replicas_in_sync)
        self._settings = GradientSettings.from_config(config, jit and not one_replica)
        self.jit = jit
        # AutoGraph is for users' code; ours needs none, and converting it costs a second or more.
        self._autograph = task.has_user_code
        self._may_do_without_jit = config.jit_compile == "auto"
        self._train = self._function(self._train_steps, (jit and one_replica) or None)
        self._eval = self._function(self._eval_steps, None)
        self._traced = None

    def _function(self, fn: Callable, jit: bool | None) -> Callable:
        return tf.function(fn, jit_compile=jit, autograph=self._autograph)

    def train(self, chunk: Batch, first: int, count: int) -> Outcome:
        """Trains on batches [first, first + count) of a chunk of tensors [k, batch_size, ...]."""
        # Tensors, not Python numbers: a number would be traced anew for each value.
        numbers = tf.constant(first, tf.int32), tf.constant(count, tf.int32)
        # What is compiled is called itself: to look for it by the types of a chunk takes longer.
        return (self._traced or self._train)(chunk, *numbers)

    def evaluate(self, chunk: Batch, count: int) -> None:
        """Adds the first `count` batches of a chunk to `eval_sums`."""
        self._eval(chunk, tf.constant(count, tf.int32))

    def compile(self, element_spec: dict[str, tf.TensorSpec], evaluating: bool = False) -> None:
        """Traces and compiles for chunks of these types, by a call of no steps.

        Raises:
          UserError: if code that a flag names fails in it.
        """
        try:
            self._compile(element_spec, evaluating)
        except UserError:
            raise
        except Exception as error:
            if self.jit and not evaluating and isinstance(error, tf.errors.OpError):
                self._give_up_jit(error)
                self._compile(element_spec, evaluating)
                return
            if not self.task.has_user_code:
                raise
            raise UserError(
                f"tracing the step failed in --task, --model, --loss, --regularizer or --metrics: "
                f"{reason(error)}"
            ) from error

    def _give_up_jit(self, error: tf.errors.OpError) -> None:
        # The first line names the operation, amid names of graphs and nodes.
        why = re.sub(r"\[.*?\]|\{\{.*?\}\}", "", str(error).splitlines()[0])[:300]
        if not self._may_do_without_jit:
            raise UserError(f"--jit_compile=true: XLA cannot compile this step: {why}")
        _log.info("jit_compile=auto: not used after all, XLA cannot compile this step: %s", why)
        self.jit, self._train = False, self._function(self._train_steps, None)

    def _compile(self, element_spec: dict[str, tf.TensorSpec], evaluating: bool) -> None:
        chunk = {key: tf.zeros(spec.shape, spec.dtype) for key, spec in element_spec.items()}
        if evaluating:
            self.evaluate(chunk, 0)
            return
        self.train(chunk, 0, 0)
        zero = tf.constant(0, tf.int32)
        self._traced = self._train.get_concrete_function(chunk, zero, zero)

    def untracked_variables(self, known: Iterable[tf.Variable]) -> list[tf.Variable]:
        """Variables that the compiled training steps touch beside `known`, in the order met."""
        if self._traced is None:
            return []
        parts_of = self.strategy.experimental_local_results
        known_parts = {id(part) for variable in known for part in parts_of(variable)}
        met = {id(handle): place for place, handle in enumerate(self._traced.captured_inputs)}
        whole = {}
        for variable in self._traced.graph.variables:
            if id(variable) not in known_parts:
                owner = replicas.whole(variable)
                places = [met.get(id(part.handle), len(met)) for part in parts_of(owner)]
                whole[id(owner)] = (min(places), owner)
        return [owner for _, owner in sorted(whole.values(), key=lambda pair: pair[0])]

    def _train_steps(self, chunk: Batch, first: tf.Tensor, count: tf.Tensor) -> Outcome:
        # While loops and gather: XLA would compile a range or a slice anew for each length.
        def step(index, bad_step):
            finite = self._train_step({key: tf.gather(t, index) for key, t in chunk.items()})
            is_first_bad = tf.logical_and(~finite, tf.equal(bad_step, _NO_STEP))
            return index + 1, tf.where(is_first_bad, self.task.step, bad_step)

        # All steps but the last, then the last, of which one wants to know what it changes: two
        # rounds of one loop, for what stands in two loops is traced and compiled twice.
        ends = first + tf.stack([tf.maximum(count - 1, 0), count])

        def steps_of_round(number, index, bad_step, _):
            before = self._weights()
            index, bad_step = tf.while_loop(
                lambda index, _: index < ends[number],
                step,
                [index, bad_step],
                parallel_iterations=1,
            )
            return number + 1, index, bad_step, before

        *_, bad_step, before = tf.while_loop(
            lambda number, *_: number < 2,
            steps_of_round,
            [0, first, tf.constant(_NO_STEP, tf.int64), self._weights()],
            parallel_iterations=1,
        )
        after = self._weights()
        changes = [
            [a - b for a, b in zip(*pair, strict=True)] for pair in zip(after, before, strict=True)
        ]
        return Outcome(
            bad_step,
            self.train_sums.table(),
            tf.stack([optim.applied_rate(update.optimizer) for update in self.task.updates]),
            tf.stack([tf.linalg.global_norm(weights) for weights in after]),
            tf.stack([tf.linalg.global_norm(change) for change in changes]),
        )

    def _weights(self) -> list[list[tf.Tensor]]:
        """Copies of what each update trains, as one replica holds it."""
        return [[tf.identity(v.value) for v in u.variables] for u in self.task.updates]

    def _train_step(self, batch: Batch) -> tf.Tensor:
        """Takes one step; returns whether losses and gradients were finite, a scalar bool."""
        batch = self.task.prepare(batch, training=True)
        rows = self.strategy.run(self._replica_rows, (batch, self._settings.accum_steps))
        weight = tf.reduce_sum(batch[WEIGHT])
        total_weight = tf.where(weight > 0, weight, 1.0)  # without an example the loss is 0
        finite = tf.constant(True)
        for update in self.task.updates:
            finite &= self._update(update, rows, total_weight)
        self.task.step.assign_add(1)
        self.task.after_step()
        return finite

    def _update(self, update, rows, total_weight) -> tf.Tensor:
        """Takes one update; returns whether the run may go on, a scalar bool."""
        scale = self.scales.get(update.name)
        statistics = self._statistics() if scale else []
        before = [tf.identity(variable) for variable in statistics]

        def gradients(batch):
            self._share_keras_generator()
            result = gradients_lib.reduced_gradients(
                update, batch, total_weight, self._settings, scale, self.train_sums
            )
            if update is self.task.updates[0]:
                self.train_sums.add("examples", tf.ones_like(batch[WEIGHT]), batch[WEIGHT])
            self.train_sums.commit()
            return result

        grads, finite = self.strategy.run(gradients, (rows,))
        finite = tf.reduce_all(tf.stack(self.strategy.experimental_local_results(finite)))

        def apply():
            self.strategy.run(lambda g: gradients_lib.apply(update, g), (grads,))

        if scale is None:
            # Grappler drops the edge from some reads of a variable to its assignment, so that a
            # nested tape could see a bias already changed. All that matters leads to `finite`.
            with tf.control_dependencies([finite]):
                apply()
            return finite

        def skip():
            scale.shrink()
            for variable, value in zip(statistics, before, strict=True):
                variable.assign(value)

        # At the lowest scale, or with weights that are no numbers, it is not the scale's doing.
        sound = tf.math.is_finite(tf.linalg.global_norm([v.value for v in update.variables]))
        may_go_on = tf.logical_or(finite, tf.logical_and(scale.value > 1.0, sound))
        # Outside of replicas: a branch inside one may not communicate.
        tf.cond(finite, lambda: (apply(), scale.grow())[1], skip)
        return may_go_on

    def _statistics(self) -> list[tf.Variable]:
        """What a forward pass changes of the models, such as moving means."""
        models = self.task.models.values()
        kept = [v.value for model in models for v in model.non_trainable_variables]
        return [variable for variable in kept if variable.dtype.is_floating]

    def _eval_steps(self, chunk: Batch, count: tf.Tensor) -> None:
        def body(index):
            batch = {key: tf.gather(t, index) for key, t in chunk.items()}
            batch = self.task.prepare(batch, training=False)
            self.strategy.run(self._replica_eval, (batch,))
            return [index + 1]

        tf.while_loop(lambda index: index < count, body, [0], parallel_iterations=1)

    def _replica_eval(self, batch: Batch) -> None:
        self._share_keras_generator()
        batch = self._replica_rows(batch)
        for name, values in self.task.evaluate(batch).items():
            self.eval_sums.add(name, values, batch[WEIGHT])
        self.eval_sums.add("examples", tf.ones_like(batch[WEIGHT]), batch[WEIGHT])
        self.eval_sums.commit()

    def _replica_rows(self, batch: Batch, num_parts: int = 1) -> Batch:
        """This replica's rows of a batch, cut on the host: a contiguous slice of each part.

        A part is what passes through the model at once on all replicas together, so that batch
        normalization sees the same examples together on any number of them.
        """
        context = tf.distribute.get_replica_context()
        count = context.num_replicas_in_sync
        if count == 1:
            return batch
        replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
        cut = {}
        for key, tensor in batch.items():
            size, *shape = tensor.shape
            rows = size // (count * num_parts)
            with tf.device("cpu:0"):
                parts = tf.reshape(tensor, [num_parts, count, rows, *shape])
                cut[key] = tf.reshape(parts[:, replica], [num_parts * rows, *shape])
        return cut


def choose_jit(flag: str, task: Task, num_replicas: int) -> bool:
    """Decides on XLA and says why.

    Raises:
      UserError: for --jit_compile=true where replicas must communicate inside the compiled part.
    """
    models = task.models.values()
    synchronised = num_replicas > 1 and any(map(replicas.communicates, models))
    if flag == "true" and synchronised:
        raise UserError(
            f"--jit_compile=true: batch normalization communicates between the {num_replicas} "
            "replicas, which XLA cannot compile; leave it at auto"
        )
    if flag != "auto":
        return flag == "true"
    layers = [layer for model in models for layer in replicas.layers_of(model)]
    convolves = any("Conv" in type(layer).__name__ for layer in layers)
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    chosen = num_replicas == 1 and (on_gpu or not convolves)
    _log.info(
        "jit_compile=auto: %s",
        "one replica, the whole loop of steps is compiled by XLA"
        if chosen
        else "not used: "
        + (f"{num_replicas} replicas" if num_replicas > 1 else "convolutions on a CPU"),
    )
    return chosen
