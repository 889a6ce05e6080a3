"""The base of all tasks: what one training step and one evaluation step do."""

import dataclasses
import logging
import re
from collections.abc import Callable

import keras
import tensorflow as tf

from pipelines import Data, Spec, UserError, call_symbol, is_symbol, to_model_input
from trainer import models, optim, replicas
from trainer.config import TrainConfig
from trainer.report import Report

_log = logging.getLogger(__name__)

Batch = dict[str, tf.Tensor]
Values = dict[str, tf.Tensor]
LossFn = Callable[[Batch], tuple[tf.Tensor, Values]]


@dataclasses.dataclass(frozen=True)
class TaskContext:
    """What a task is built from.

    Attributes:
      config: the run's settings.
      spec: the data's spec.
      total_steps: steps of the whole training.
      steps_per_epoch: steps of one epoch.
      data: the pipelines, where the run has them.
      report: what the run says, None for a run that says nothing.
    """

    config: TrainConfig
    spec: Spec
    total_steps: int = 1
    steps_per_epoch: int = 1
    data: Data | None = None
    report: Report | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """One optimizer's part in a training step.

    Attributes:
      name: names it in reports and checkpoints.
      loss_fn: called with a replica's batch, returns (loss per example [batch], further values per
        example [batch] to report).
      variables: what the optimizer changes.
      optimizer: built on `variables`.
      penalty_fn: returns a scalar added once to the mean loss, whatever the number of replicas.
    """

    name: str
    loss_fn: LossFn
    variables: list
    optimizer: keras.optimizers.Optimizer
    penalty_fn: Callable[[], tf.Tensor]

    @property
    def prefix(self) -> str:
        """Before the names of what it reports; none for a task's only update."""
        return "" if self.name == "model" else f"{self.name}_"


class Task:
    """Owns models, optimizers, losses and metrics. Subclass, and give `build` and `evaluate`.

    Everything else is generic: distribution, compilation, the loop, checkpoints, clock, reports.
    A training step runs `updates` in their order, each seeing what those before it have changed.
    Variables that `build` makes attributes of the task, alone or in a list or dictionary, are saved
    under these names, and are there again when a run is resumed, evaluated or exported.

    Attributes:
      config, spec, total_steps, steps_per_epoch, data, report: the context.
      models: name -> model; all their variables are saved.
      updates: the parts of a training step.
      step: int64 variable, finished training steps.
    """

    best_metric = "loss"  # the evaluation metric that chooses the best checkpoint
    lower_is_better: tuple[str, ...] = ()  # metrics, beside those whose name holds loss, error, ...
    evaluates_untrained = False  # whether there is an evaluation at step 0 too

    def __init__(self, context: TaskContext):
        self.config, self.spec = context.config, context.spec
        self.total_steps, self.steps_per_epoch = context.total_steps, context.steps_per_epoch
        self.data, self.report = context.data, context.report
        self.models: dict[str, keras.Model] = {}
        self.updates: list[Update] = []
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")

    # To be given by a task.

    def build(self) -> None:
        """Makes models and updates with `add_model` and `add_update`; called in scope."""
        raise NotImplementedError

    def evaluate(self, batch: Batch) -> Values:
        """Values per example [batch] of one replica's batch; "loss" among them."""
        raise NotImplementedError

    def prepare(self, batch: Batch, training: bool) -> Batch:
        """May add entries [batch_size, ...] to a whole batch before replicas share it out.

        The place to draw random numbers: those of `pipelines.randomness`, seeded by `self.step`,
        are the same on any number of replicas, after a restart, and whether XLA compiles the step
        or not; those of `tf.random.stateless_*` are not the same with XLA and without.
        """
        return batch

    def after_step(self) -> None:
        """Called once after a step's updates, such as to move a target network.

        Called outside of replicas: an assignment changes all copies of a variable, and may be made
        under a `tf.cond`. `self.step` counts the step already.
        """
        return  # AutoGraph cannot read a body that is a docstring only

    def finish_evaluation(self, metrics: dict[str, float]) -> dict[str, float]:
        """Called after an evaluation; may add metrics that need more than one example."""
        return metrics

    def export(self, folder: str) -> None:
        """Writes what serves the trained models; a task without servable models writes none."""

    # For use by a task.

    @property
    def has_user_code(self) -> bool:
        """Whether functions from outside this package run in the steps."""
        config = self.config
        named = (config.model, config.loss or "", config.regularizer or "", *config.metrics)
        return any(map(is_symbol, named)) or not type(self).__module__.startswith("trainer.")

    def add_model(self, name: str, model: keras.Model) -> keras.Model:
        """Adopts a model made in scope: its variables are saved, its statistics synchronised."""
        if not isinstance(model, keras.Model):
            raise UserError(f"model {name!r} is a {type(model).__name__}, not a keras.Model")
        if not model.built:
            model(to_model_input(tf.zeros([1, *self.spec.input_shape], self.spec.input_dtype)))
        replicas.adapt(name, model)
        self.models[name] = model
        return model

    def add_update(
        self,
        loss_fn: LossFn,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        name: str = "model",
        penalty_fn: Callable[[], tf.Tensor] | None = None,
    ) -> None:
        """Adds an optimizer's part in a training step.

        Args:
          loss_fn: see `Update`.
          model: its trainable variables are changed.
          optimizer: unbuilt; None: the one the flags ask for.
          name: see `Update`.
          penalty_fn: see `Update`; None: the model's own regularisation losses.
        """
        if name in [update.name for update in self.updates]:
            raise UserError(f"--task: there is an update {name!r} already: give each a name")
        optimizer = optimizer or optim.make_optimizer(
            self.config, self.total_steps, self.steps_per_epoch
        )
        variables = list(model.trainable_variables)
        if not variables:
            raise UserError(f"model {name!r} has no trainable variables")
        optim.build_optimizer(optimizer, variables)
        penalty_fn = penalty_fn or (lambda: add_losses(model.losses))
        self.updates.append(Update(name, loss_fn, variables, optimizer, penalty_fn))

    def inputs(self, batch: Batch) -> tf.Tensor:
        """The model's input, float32 [batch, *input_shape], scaled on the device."""
        return to_model_input(batch[self.spec.input_key])

    def labels(self, batch: Batch) -> tf.Tensor:
        """The labels as stored, [batch, *label_shape]."""
        return batch[self.spec.label_key]


def add_losses(losses: list) -> tf.Tensor:
    """Sum of scalar losses, 0 for none."""
    return tf.add_n([tf.cast(loss, tf.float32) for loss in losses]) if losses else tf.constant(0.0)


def make_model(config: TrainConfig, spec: Spec) -> keras.Model:
    """The model that --model names, with --freeze applied; call in scope.

    Raises:
      UserError: if it cannot be made for this data, or its output has the wrong shape.
    """
    if is_symbol(config.model):
        model = call_symbol("model", config.model, spec)
    else:
        model = models.build_model(config.model, spec, hidden_units=config.hidden_units)
    if not isinstance(model, keras.Model):
        raise UserError(
            f"--model={config.model}: returned {type(model).__name__}, not a keras.Model"
        )
    if not model.built:
        model(to_model_input(tf.zeros([1, *spec.input_shape], spec.input_dtype)))
    freeze(model, config.freeze)
    return model


def freeze(model: keras.Model, pattern: str | None) -> None:
    """Stops the layers from being trained whose path the regular expression finds.

    Raises:
      UserError: if it finds no layer.
    """
    if not pattern:
        return
    layers = replicas.layers_of(model)
    frozen = [layer for layer in layers if re.search(pattern, layer.path or layer.name)]
    if not frozen:
        names = ", ".join(layer.name for layer in model.layers)
        raise UserError(f"--freeze={pattern}: finds no layer; the model has {names}")
    for layer in frozen:
        layer.trainable = False
    _log.info("frozen: %s", ", ".join(layer.name for layer in frozen))
