"""Optimizers and learning-rate schedules, by name."""

import inspect
from collections.abc import Callable

import keras

from pipelines import UserError, call_symbol, is_symbol, load_symbol, symbol_name
from trainer.config import TrainConfig

SCHEDULES = ("constant", "cosine", "linear", "piecewise", "exponential")


def make_optimizer(
    config: TrainConfig, total_steps: int, steps_per_epoch: int
) -> keras.optimizers.Optimizer:
    """The optimizer that the flags ask for, unbuilt; call inside the strategy's scope.

    Raises:
      UserError: for an unknown name, or a setting that this optimizer does not have.
    """
    make_fn = _optimizer_fn(config)
    rate = _default_rate(make_fn) if config.learning_rate is None else config.learning_rate
    settings = {
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
        "use_ema": True if config.ema_decay is not None else None,
        "ema_momentum": config.ema_decay,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    for name in settings:
        if name not in inspect.signature(make_fn).parameters:
            flag = "ema_decay" if "ema" in name else name
            raise UserError(f"--{flag}: the optimizer {config.optimizer} has no such setting")
    settings["learning_rate"] = make_schedule(config, rate, total_steps, steps_per_epoch)
    optimizer = call_symbol("optimizer", make_fn, **settings)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UserError(
            f"--optimizer={config.optimizer}: returned {type(optimizer).__name__}, not a "
            "keras.optimizers.Optimizer"
        )
    return optimizer


def check_names(config: TrainConfig) -> None:
    """Refuses an optimizer or a schedule that does not exist.

    Raises:
      UserError: naming those that do.
    """
    _optimizer_fn(config)
    if is_symbol(config.lr_schedule):
        load_symbol("lr_schedule", config.lr_schedule)
    elif config.lr_schedule not in SCHEDULES:
        raise UserError(
            f"--lr_schedule={config.lr_schedule}: unknown; choose one of {', '.join(SCHEDULES)}, "
            "or module:function"
        )


def build_optimizer(optimizer: keras.optimizers.Optimizer, variables: list) -> None:
    """Creates the slots, in scope and before tracing; bias and norm are left undecayed."""
    if getattr(optimizer, "weight_decay", None):
        undecayed = [v for v in variables if len(v.shape) < 2]
        optimizer.exclude_from_weight_decay(undecayed)
    optimizer.build(variables)


def _optimizer_fn(config: TrainConfig) -> Callable[..., keras.optimizers.Optimizer]:
    if is_symbol(config.optimizer):
        return load_symbol("optimizer", config.optimizer)
    classes = _optimizer_classes()
    if config.optimizer.lower() not in classes:
        raise UserError(
            f"--optimizer={config.optimizer}: unknown; choose one of {', '.join(sorted(classes))}, "
            "or module:function"
        )
    return classes[config.optimizer.lower()]


def _optimizer_classes() -> dict[str, type]:
    skipped = {"optimizer", "lossscaleoptimizer", "multioptimizer"}
    return {
        name.lower(): cls
        for name, cls in vars(keras.optimizers).items()
        if isinstance(cls, type)
        and issubclass(cls, keras.optimizers.Optimizer)
        and name.lower() not in skipped
    }


def _default_rate(make_fn) -> float:
    parameter = inspect.signature(make_fn).parameters.get("learning_rate")
    default = parameter.default if parameter else inspect.Parameter.empty
    return default if isinstance(default, (int, float)) else 1e-3


def make_schedule(config: TrainConfig, rate: float, total_steps: int, steps_per_epoch: int):
    """The learning rate as a number, or as a Keras schedule of the finished steps.

    Args:
      config: names the schedule.
      rate: its peak.
      total_steps: steps of the whole training.
      steps_per_epoch: steps of one epoch.

    Raises:
      UserError: for an unknown name or a warm-up that leaves no step for the schedule.
    """
    if config.warmup_steps and config.warmup_steps >= total_steps:
        raise UserError(
            f"--warmup_steps={config.warmup_steps}: training has only {total_steps} steps"
        )
    steps = max(1, total_steps - config.warmup_steps)
    schedules = keras.optimizers.schedules
    name = config.lr_schedule
    if is_symbol(name):
        schedule = call_symbol("lr_schedule", name, rate, steps)
        if not isinstance(schedule, (int, float, schedules.LearningRateSchedule)):
            raise UserError(
                f"--lr_schedule={symbol_name(name)}: returned {type(schedule).__name__}, not a "
                "keras.optimizers.schedules.LearningRateSchedule or a number"
            )
    elif name == "constant":
        schedule = rate
    elif name == "cosine":
        schedule = schedules.CosineDecay(rate, steps)
    elif name == "linear":
        schedule = schedules.PolynomialDecay(rate, steps, end_learning_rate=0.0)
    elif name == "exponential":
        decay = 0.96 if config.lr_decay_rate is None else config.lr_decay_rate
        every = config.lr_decay_steps or steps_per_epoch
        schedule = schedules.ExponentialDecay(rate, every, decay)
    else:  # piecewise: `check_names` knows no other
        given = [boundary - config.warmup_steps for boundary in config.lr_boundaries]
        boundaries = given or [steps // 2, steps * 3 // 4]
        drop = 0.1 if config.lr_decay_rate is None else config.lr_decay_rate
        values = [rate * drop**i for i in range(len(boundaries) + 1)]
        schedule = schedules.PiecewiseConstantDecay(boundaries, values)
    return WarmUp(rate, config.warmup_steps, schedule) if config.warmup_steps else schedule


@keras.saving.register_keras_serializable("pipeline_trainer")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Linear rise from 0 over `warmup_steps`, then another schedule counted from there.

    The rise is the one of Goyal et al. 2017, section 2.2: rate * step / warmup_steps.
    """

    def __init__(self, rate: float, warmup_steps: int, after):
        super().__init__()
        self.rate, self.warmup_steps, self.after = rate, warmup_steps, after

    def __call__(self, step):
        step = keras.ops.cast(step, "float32")
        rising = self.rate * step / self.warmup_steps
        after = self.after
        if callable(after):
            after = after(keras.ops.maximum(step - self.warmup_steps, 0.0))
        return keras.ops.where(step < self.warmup_steps, rising, after)

    def get_config(self):
        after = self.after
        if isinstance(after, keras.optimizers.schedules.LearningRateSchedule):
            after = keras.saving.serialize_keras_object(after)
        return {"rate": self.rate, "warmup_steps": self.warmup_steps, "after": after}

    @classmethod
    def from_config(cls, config):
        after = config["after"]
        if isinstance(after, dict):
            after = keras.saving.deserialize_keras_object(after)
        return cls(config["rate"], config["warmup_steps"], after)


def applied_rate(optimizer: keras.optimizers.Optimizer):
    """The learning rate of the optimizer's last update, a float32 scalar; also while tracing."""
    schedule = optimizer._learning_rate
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        rate = schedule(keras.ops.maximum(optimizer.iterations - 1, 0))
    else:
        rate = optimizer.learning_rate
    return keras.ops.cast(rate, "float32")
