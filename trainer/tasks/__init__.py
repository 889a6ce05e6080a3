"""Tasks: what is learnt. `base` says what a task is, the others are the ones shipped."""

import pathlib
from typing import Any

import keras
import tensorflow as tf

from pipelines import UserError, is_symbol, load_symbol
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
    task.build()
    if not task.models or not task.updates:
        raise UserError(f"--task={name}: build() must add a model and an update")
    return task


def set_learning_rates(task: Task) -> None:
    """Puts --learning_rate in force after a restore, which brings back the saved one."""
    rate = task.config.learning_rate
    for update in task.updates:
        optimizer = update.optimizer
        scheduled = isinstance(
            optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule
        )
        if rate is not None and not scheduled:
            optimizer.learning_rate = rate


def model_variables(task: Task) -> dict[str, tf.Variable]:
    """Every variable of the models, by its name in a checkpoint."""
    return {
        f"models.{name}.{index:03d}.{variable.name}": variable.value
        for name, model in task.models.items()
        for index, variable in enumerate(model.variables)
    }


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
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"--init_from={source}: does not fit this model{hint}: {reason}") from error
