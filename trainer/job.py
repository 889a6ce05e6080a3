"""One run from its settings to its result: puts the rooms together."""

import contextlib
import dataclasses
import json
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import pipelines
from pipelines import (
    Data,
    DataConfig,
    UserError,
    check_values,
    load_data,
    load_symbol,
    machine,
)
from trainer import evaluation, identity, loop, model_dir, storage, strategy, tasks
from trainer.checkpoint import CheckpointStore
from trainer.clock import Clock
from trainer.config import TrainConfig, define_flags
from trainer.report import Report, finite
from trainer.signals import Stopped, StopRequest
from trainer.step import Stepper, reason

_log = logging.getLogger(__name__)

_PROCESS_START = time.time()


@dataclasses.dataclass
class Job:
    """A run's parts, built by `open_job`."""

    config: TrainConfig
    data_config: DataConfig
    model_dir: pathlib.Path
    flags_text: str
    stop: StopRequest
    clock: Clock = dataclasses.field(default_factory=Clock)

    def __post_init__(self):
        self.checkpoints = CheckpointStore(self.model_dir / "checkpoints", self.config.max_to_keep)
        self.best = CheckpointStore(self.model_dir / "best", 1)
        self.report = Report(self.model_dir, self.config.tensorboard)

    def run(self) -> dict[str, Any]:
        """Does what --mode says and returns the content of result.json.

        Raises:
          UserError, Stopped.
        """
        manifest = self._manifest()
        self._saved_state = manifest["state"] if manifest else {}
        tasks.check_names(self.config)
        strategy.set_up_process(self.config)
        self.strategy = strategy.make_strategy(self.config)
        if self.config.training:
            size = self.data_config.batch_size
            strategy.check_batch_size(self.strategy, size, self.config.grad_accum_steps)
        self.data = self._load_data(manifest)
        self.stop.raise_if_received()
        with self.strategy.scope():
            self._build()
            self.clock.add("startup", time.time() - _PROCESS_START)
            self._start(manifest)
            if self.config.training:
                self._train()
            elif self.config.mode == "eval":
                self._evaluate_once()
            if self.config.mode == "export" or (self.config.training and self.config.export):
                self._export()
        self.report.close()
        self.report.check_complete()
        result = self._result()
        if self.config.mode != "export":
            text = json.dumps(finite(result), indent=1)
            storage.write_atomically(self.model_dir / "result.json", text)
        return result

    # Opening.

    def _manifest(self) -> dict[str, Any] | None:
        """The checkpoint to go on from, checked against the settings as far as they tell."""
        config = self.config
        if self.checkpoints.holds_foreign_files() and not (self.model_dir / "flags.txt").exists():
            raise UserError(
                f"--model_dir={self.model_dir}: holds checkpoints that this package did not write"
            )
        manifest = self.checkpoints.newest()
        if manifest and config.resume == "never":
            raise UserError(
                f"--resume=never: {self.model_dir} holds a checkpoint of step {manifest['step']}"
            )
        if not manifest and (config.resume == "must" or not config.training):
            raise UserError(f"--model_dir={self.model_dir}: holds no checkpoint to read")
        if manifest:
            where = f"checkpoint {manifest['step']} in {self.model_dir}"
            identity.check(manifest["identity"], identity.of_flags(config, self.data_config), where)
        return manifest

    def _load_data(self, manifest: dict[str, Any] | None) -> Data:
        config = self.data_config
        if manifest and config.num_classes is None and not self.config.training:
            config = dataclasses.replace(config, num_classes=self._saved_state["num_classes"])
        size = config.eval_batch_size or config.batch_size
        replicas = self.strategy.num_replicas_in_sync
        config = dataclasses.replace(config, eval_batch_size=-(-size // replicas) * replicas)
        return load_data(
            config,
            training=self.config.training,
            evaluating=self.config.evaluating,
            numeric_labels=self.config.task == "regression",
            mixing=self.config.mixes,
        )

    def _build(self) -> None:
        data, config = self.data, self.config
        saved_steps = self._saved_state.get("steps_per_epoch", 1)
        steps_per_epoch = data.train.steps_per_epoch if data.train else saved_steps
        epochs = 5 if config.train_epochs is None else config.train_epochs
        total_steps = config.train_steps or epochs * steps_per_epoch
        if config.profile_steps and config.profile_steps[0] > total_steps:
            first, last = config.profile_steps
            raise UserError(f"--profile_steps={first},{last}: there are {total_steps} steps")
        # Just before the weights are drawn: reading data may use Python's generator too.
        keras.utils.set_random_seed(config.seed % 2**32)
        context = tasks.TaskContext(
            config, data.spec, total_steps, steps_per_epoch, data, self.report
        )
        self.task = tasks.make_task(context)
        self._built_rates = tasks.learning_rates(self.task)
        if config.summary:
            for model in self.task.models.values():
                model.summary()
        _log.info(
            "%s: %s parameters, %d replicas on %s",
            ", ".join(self.task.models),
            f"{self._parameters():,}",
            self.strategy.num_replicas_in_sync,
            ", ".join(strategy.describe_devices(self.strategy)),
        )
        self.stepper = Stepper(self.task, self.strategy, config)
        self.evaluator = data.evaluation and evaluation.Evaluator(
            self.task, self.stepper, data.evaluation, self.clock, self.stop
        )
        callback = config.callback and _told(load_symbol("callback", config.callback))
        self.loop = loop.Loop(
            config,
            self.task,
            self.stepper,
            data.train,
            self.evaluator,
            self.report,
            self.clock,
            self.stop,
            self._save,
            self.checkpoints,
            self.best,
            callback,
        )

    def _start(self, manifest: dict[str, Any] | None) -> None:
        """Compiles, then restores: what the traced steps touch is known by then."""
        with self.clock.timing("compile"):
            self._compile()
        self._variables = collect_variables(self.task, self.stepper)
        if self.evaluator:
            self.evaluator.random_state = random_state(self._variables)
        if manifest:
            where = f"checkpoint {manifest['step']} in {self.model_dir}"
            if self.config.training:
                identity.check(manifest["identity"], self._identity(), where)
            self._restore(manifest)
            return
        self.report.rewind(-1)  # to before what a run said that was killed without a checkpoint
        if self.config.init_from:
            self._warm_start()

    def _warm_start(self) -> None:
        try:
            tasks.warm_start(self.task, self.config.init_from)
        except UserError:
            raise
        except Exception as error:  # a damaged archive: whatever unpacking it raises
            raise UserError(
                f"--init_from={self.config.init_from}: cannot be read: "
                f"{type(error).__name__}: {reason(error)}"
            ) from error

    def _compile(self) -> None:
        if self.data.train:
            self.stepper.compile(self.data.train.element_spec())
        if self.data.evaluation:
            self.stepper.compile(self.data.evaluation.element_spec(1), evaluating=True)
            self.loop.check_metrics()

    def _restore(self, manifest: dict[str, Any]) -> None:
        step = manifest["step"]
        variables = self._variables
        if not self.config.training:
            variables = {k: v for k, v in variables.items() if k.startswith(self._evaluated())}
        self.checkpoints.restore(step, variables, exact=self.config.training)
        self.loop.restore(step, manifest["state"])
        if self.config.training:
            self._honour_learning_rate(manifest["state"].get("learning_rate"))
            self.report.rewind(step, evaluated=not self.loop.evaluates_first)
            with contextlib.suppress(*storage.WRITE_ERRORS):  # the next checkpoint will say it
                self.checkpoints.list_up_to(step)  # a kill may have come before that
                self.best.forget_after(step)
            _log.info("resumed at step %d", step)

    def _evaluated(self) -> tuple[str, ...]:
        """How the names begin of the variables that evaluation and export need."""
        averaging = [u.name for u in self.task.updates if u.optimizer.use_ema]
        return ("models.", "step", "task.", *(f"optimizers.{name}." for name in averaging))

    def _honour_learning_rate(self, saved: float | None) -> None:
        """Puts a --learning_rate other than the `saved` one in force in place of the restored."""
        rate = self.config.learning_rate
        if rate is not None and rate != saved:
            tasks.set_learning_rates(self.task, self._built_rates)
            _log.info("--learning_rate=%g from here on, %s before", rate, saved or "another")

    def _identity(self) -> dict[str, Any]:
        return identity.of_run(self.config, self.data_config, self.data)

    # Doing.

    def _train(self) -> None:
        # The folder last: it may have been chosen here, and evaluation needs it.
        text = f"{self.flags_text}--model_dir={self.model_dir}\n"
        storage.write_atomically(self.model_dir / "flags.txt", text)
        while True:
            try:
                self.loop.train()
                return
            except loop.NotFinite as error:
                self._roll_back(error)

    def _roll_back(self, error: loop.NotFinite) -> None:
        """Returns to the newest checkpoint with another data order, or gives up."""
        rollbacks = self.loop.progress.rollbacks + 1
        if self.config.on_nan == "fail" or rollbacks > self.config.max_rollbacks:
            raise UserError(f"{error}; lower --learning_rate or set --grad_clip_norm") from error
        manifest = self.checkpoints.newest()
        if manifest is None:
            raise UserError(f"{error}; there is no checkpoint to roll back to yet") from error
        _log.warning(
            "%s: rolling back to step %d with another data order (%d of %d)",
            error,
            manifest["step"],
            rollbacks,
            self.config.max_rollbacks,
        )
        self._restore(manifest)
        self.loop.roll_back(rollbacks)

    def _evaluate_once(self) -> None:
        row = self.loop.evaluate()
        self.loop.progress.standing.last = row
        self.report.replace_eval(row)

    def _export(self) -> None:
        if type(self.task).export is tasks.Task.export:
            if self.config.mode == "export":
                raise UserError(
                    f"--mode=export: --task={self.config.task} has no export of its own"
                )
            _log.info("nothing exported: --task=%s has no export of its own", self.config.task)
            return
        folder = self.model_dir / "export"
        try:
            with evaluation.averaged_weights(self.task):
                self.task.export(str(folder))
        except UserError:
            raise
        except storage.WRITE_ERRORS as error:
            raise UserError(f"{folder}: cannot be written: {storage.reason(error)}") from error
        except Exception as error:  # a user's model or task: whatever it raises
            raise UserError(
                f"--export: failed: {type(error).__name__}: {reason(error)}; the weights are in "
                f"{self.checkpoints.folder}"
            ) from error
        weights = "averaged" if evaluation.uses_average(self.task) else "raw"
        _log.info("exported the %s weights to %s", weights, folder)

    def _save(self, store: CheckpointStore, step: int, state: dict[str, Any]) -> None:
        state = {
            **state,
            "num_classes": self.data.spec.num_classes,
            "learning_rate": self.config.learning_rate,
            "steps_per_epoch": self.task.steps_per_epoch,
            "train_examples": self.data.train.num_examples,
        }
        store.save(step, self._variables, self._identity(), state)

    def _parameters(self) -> int:
        return sum(model.count_params() for model in self.task.models.values())

    def _result(self) -> dict[str, Any]:
        progress, clock = self.loop.progress, self.clock
        standing = progress.standing
        train_secs = clock.total("train")
        train, saved_examples = self.data.train, self._saved_state.get("train_examples")
        return {
            "steps": self.loop.step,
            "epochs": self.loop.step / self.task.steps_per_epoch,
            "eval": _without(standing.last, "split"),
            "best": _without(standing.best, "split"),
            "examples_per_sec": progress.train_examples / train_secs if train_secs else 0.0,
            **{f"{kind}_secs": clock.total(kind) for kind in ("startup", "compile", "train")},
            **{f"{kind}_secs": clock.total(kind) for kind in ("eval", "checkpoint")},
            "input_wait": clock.total("input") / train_secs if train_secs else 0.0,
            "stop_reason": standing.stop_reason,
            "strategy": self.config.strategy,
            "replicas": self.strategy.num_replicas_in_sync,
            "devices": strategy.describe_devices(self.strategy),
            "dataset": {
                "name": self.data.name,
                "version": self.data.version,
                "train_examples": train.num_examples if train else saved_examples,
                "eval_examples": self.data.evaluation and self.data.evaluation.num_examples,
            },
            "parameters": self._parameters(),
            "versions": machine.versions(),
            "model_dir": str(self.model_dir),
            "finished": True,
        }


def _told(callback: Callable[[str, loop.Loop], None]) -> Callable[[str, loop.Loop], None]:
    """The same callback, with what fails in it told in one line."""

    def call(event: str, running: loop.Loop) -> None:
        try:
            callback(event, running)
        except (UserError, Stopped):
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise UserError(f"--callback: failed at {event!r}: {told}") from error

    return call


def _without(row: dict[str, Any] | None, key: str) -> dict[str, Any] | None:
    return row and {k: v for k, v in row.items() if k != key}


def collect_variables(task: tasks.Task, stepper: Stepper) -> dict[str, tf.Variable]:
    """Every variable that a resumed run needs, by a name that does not depend on the process.

    Those of models and optimizers by place and name, those of the task by its attributes; then
    whatever else the traced steps read or write, such as the random state of a layer or of Keras as
    a whole.
    """
    found: dict[str, tf.Variable] = {"step": task.step, **tasks.model_variables(task)}
    found |= tasks.own_variables(task)
    for update in task.updates:
        for index, variable in enumerate(update.optimizer.variables):
            found[f"optimizers.{update.name}.{index:03d}.{variable.name}"] = variable.value
    found["train_sums"] = stepper.train_sums.variable
    for name, scale in stepper.scales.items():
        found[f"loss_scale.{name}.value"] = scale.value
        found[f"loss_scale.{name}.good_steps"] = scale.good_steps
        found[f"loss_scale.{name}.overflow_steps"] = scale.overflow_steps
    for index, variable in enumerate(stepper.untracked_variables(found.values())):
        found[f"others.{index:03d}"] = variable
    return found


def random_state(variables: dict[str, tf.Variable]) -> list[tf.Variable]:
    """Those of `collect_variables` that hold random state: integers that no optimizer counts."""
    return [
        variable
        for name, variable in variables.items()
        if name.startswith(("models.", "others.")) and variable.dtype.is_integer
    ]


def run(
    config: TrainConfig,
    data_config: DataConfig,
    flags_text: str = "",
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Runs one job in --model_dir, alone, and returns the content of result.json.

    Args:
      config: what is trained and how.
      data_config: on which data.
      flags_text: a flagfile that reproduces the run, written to flags.txt.
      stop: where a wish to stop arrives.

    Raises:
      UserError: for what the user can mend.
      Stopped: after a signal.
    """
    check_values(config, define_flags)
    check_values(data_config, pipelines.define_flags)
    folder = model_dir.open_folder(config)
    with model_dir.locked(folder):
        job = Job(config, data_config, folder, flags_text, stop or StopRequest())
        try:
            return job.run()
        except UserError:
            model_dir.remove_if_unused(folder)
            raise
        finally:
            job.report.close()
