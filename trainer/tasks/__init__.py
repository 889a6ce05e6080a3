"""Tasks: what is learnt. `base` says what a task is, the others are the ones shipped."""

import pathlib
from typing import Any

import keras
import tensorflow as tf

from pipelines import UserError, call_symbol, is_symbol, load_symbol
from trainer import losses, models, optim
from trainer.config import TrainConfig
from trainer.tasks.base import Batch, Task, TaskContext, Update, Values, make_model
from trainer.tasks.supervised import Classification, Regression

__all__ = [
    "Batch",
    "Task",
    "TaskContext",
    "Update",
    "Values",
    "check_names",
    "make_model",
    "make_task",
]

_TASKS = {
    "classification": Classification,
    "regression": Regression,
    "gan": "trainer.tasks.gan:Gan",  # by name, for it trains with what is built on tasks
}


def check_names(config: TrainConfig) -> None:
    """Refuses names that nothing answers to, before any data is read.

    Raises:
      UserError: for an unknown task, model, loss, optimizer or schedule.
    """
    if config.task != "auto":
        _task_class(config.task)
    if not is_symbol(config.model):
        models.check_name(config.model)
    if config.loss:
        losses.make_loss_fn(config.loss)
    optim.check_names(config)


def _task_class(name: Any) -> type[Task]:
    if not is_symbol(name) and name not in _TASKS:
        raise UserError(
            f"--task={name}: unknown; choose auto, {', '.join(_TASKS)}, or module:Class"
        )
    cls = _TASKS.get(name, name)
    if is_symbol(cls):
        cls = load_symbol("task", cls)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise UserError(f"--task={name}: not a subclass of trainer.Task")
    return cls


def make_task(context: TaskContext) -> Task:
    """Makes and builds the task that --task names; call inside the strategy's scope.

    Raises:
      UserError: for an unknown task, or one that does not fit the data.
    """
    name = context.config.task
    if name == "auto":
        name = "regression" if context.spec.num_classes is None else "classification"
    task = _task_class(name)(context)
    call_symbol("task", task.build)
    if not task.models or not task.updates:
        raise UserError(f"--task={name}: build() must add a model and an update")
    return task


def learning_rates(task: Task) -> list[float | None]:
    """The rate of each update's optimizer, None where a schedule gives it."""
    schedule = keras.optimizers.schedules.LearningRateSchedule
    optimizers = [update.optimizer for update in task.updates]
    return [
        None if isinstance(o._learning_rate, schedule) else float(o.learning_rate.numpy())
        for o in optimizers
    ]


def set_learning_rates(task: Task, rates: list[float | None]) -> None:
    """Gives the optimizers what `learning_rates` returned earlier."""
    for update, rate in zip(task.updates, rates, strict=True):
        if rate is not None:
            update.optimizer.learning_rate = rate


def model_variables(task: Task) -> dict[str, tf.Variable]:
    """Every variable of the models, by its name in a checkpoint."""
    return {
        f"models.{name}.{index:03d}.{variable.name}": variable.value
        for name, model in task.models.items()
        for index, variable in enumerate(model.variables)
    }


def own_variables(task: Task) -> dict[str, tf.Variable]:
    """The variables that are attributes of a task, alone or in lists and dictionaries."""
    found = {}
    for name, value in vars(task).items():
        leaves = value.values() if isinstance(value, dict) else value
        leaves = leaves if isinstance(value, (dict, list, tuple)) else [value]
        for index, leaf in enumerate(leaves):
            variable = leaf.value if isinstance(leaf, keras.Variable) else leaf
            if isinstance(variable, tf.Variable) and variable is not task.step:
                found[f"task.{name}.{index:03d}"] = variable
    return found


def warm_start(task: Task, source: str) -> None:
    """Starts the models from another run's checkpoint or from a .keras file.

    Args:
      task: a built task.
      source: path of a .keras file, or of a checkpoint without suffix.

    Raises:
      UserError: if it cannot be read or does not fit.
    """
    try:
        if source.endswith(".keras"):
            saved = keras.saving.load_model(source, compile=False, safe_mode=True)
            first = next(iter(task.models.values()))
            first.set_weights(saved.get_weights())
            return
        saved = tf.train.Checkpoint(variables=model_variables(task)).read(source)
        saved.assert_existing_objects_matched().expect_partial()
    except (AssertionError, ValueError, OSError, RuntimeError, tf.errors.OpError) as error:
        files = (pathlib.Path(source), pathlib.Path(f"{source}.index"))
        hint = "" if any(file.exists() for file in files) else " (no such file)"
        if files[0].is_dir():
            hint = " (a folder; give a checkpoint in it, such as checkpoints/ckpt-100)"
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"--init_from={source}: does not fit this model{hint}: {reason}") from error
