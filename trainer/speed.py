"""What `trainer.benchmark` measures: its variants, their turns on the clock, and the rows."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import statistics
import tempfile
from typing import Any

import keras
from tqdm import tqdm

from pipelines import (
    Data,
    DataConfig,
    Pipeline,
    UserError,
    load_data,
    machine,
    tables,
    to_model_input,
)
from trainer import baselines, optim, strategy, tasks
from trainer.baselines import RunFn, Turn, timed
from trainer.benchmark import Settings
from trainer.clock import Clock
from trainer.config import TrainConfig
from trainer.loop import Loop, NotFinite
from trainer.report import Report
from trainer.signals import StopRequest
from trainer.step import Stepper

_log = logging.getLogger(__name__)

_TURN_SECS = 1.5
_CALIBRATION_SECS = 0.3
_MIN_WARMUP_STEPS = 10
_CHUNKS_IN_FLIGHT = 4  # prefetched, being made, and held by the loop
_ENDLESS = 2**40


@dataclasses.dataclass
class Variant:
    """One row of the benchmark.

    Attributes:
      name: names it.
      run: takes turns.
      warmup_steps: steps it needs before a turn so that nothing prepared earlier counts.
      settings: chosen by the variant itself, in words.
      num_steps: steps of its turns.
    """

    name: str
    run: RunFn
    warmup_steps: int = _MIN_WARMUP_STEPS
    settings: str = ""
    num_steps: int = 0


def measure(
    config: TrainConfig, data_config: DataConfig, settings: Settings
) -> list[dict[str, Any]]:
    """Measures all variants and returns their rows, the summary last.

    Raises:
      UserError: for settings that cannot be honoured.
    """
    tasks.check_names(config)
    if settings.compare:
        _check_comparable(config.task in ("auto", "classification"))
    strategy.set_up_process(config)
    devices = strategy.make_strategy(config)
    strategy.check_batch_size(devices, data_config.batch_size, config.grad_accum_steps)
    numeric = config.task == "regression"
    data = load_data(data_config, evaluating=False, numeric_labels=numeric, mixing=config.mixes)
    if settings.compare:
        _check_comparable(data.spec.num_classes is not None)
    with tempfile.TemporaryDirectory() as folder:
        try:
            variants = _variants(_endless(config), data, devices, pathlib.Path(folder))
            if settings.compare:
                variants += _baselines(_endless(config), data, devices, pathlib.Path(folder))
            turns = _take_turns(variants, settings)
        except NotFinite as error:
            raise UserError(f"{error}; lower --learning_rate or set --grad_clip_norm") from error
    context = {
        "machine": machine.machine(),
        "versions": machine.versions(),
        "flags": {**dataclasses.asdict(data_config), **dataclasses.asdict(config)},
        "reader": data.train.reader.name,
        "replicas": devices.num_replicas_in_sync,
    }
    return _rows(variants, turns, data.train, context)


def _check_comparable(is_classification: bool) -> None:
    if not is_classification:
        raise UserError("--compare: the loops it compares with are made for classification only")


def _endless(config: TrainConfig) -> TrainConfig:
    """The same training without an end, evaluations and checkpoints."""
    return dataclasses.replace(
        config,
        mode="train",
        train_epochs=None,
        train_steps=_ENDLESS,
        eval_epochs=None,
        eval_steps=None,
        checkpoint_steps=_ENDLESS,
        checkpoint_secs=None,
        profile_steps=(),
        callback=None,
    )


# This package's own variants.


def _variants(config, data: Data, devices, folder: pathlib.Path) -> list[Variant]:
    training = _Training(config, data, devices, folder / "end_to_end")
    in_flight = _CHUNKS_IN_FLIGHT * data.train.chunking().chunk_steps
    return [
        Variant("input", _input_alone(data.train), in_flight),
        Variant("step", training.step_alone),
        Variant("end_to_end", training.end_to_end, in_flight),
    ]


def _input_alone(pipeline: Pipeline) -> RunFn:
    chunks = pipeline.chunks()

    def run_steps(count: int) -> int:
        done = 0
        while done < count:
            done += next(chunks)[1]
        return done

    return lambda warmup_steps, num_steps: timed(run_steps, warmup_steps, num_steps)


class _Training:
    """The loop as `trainer.main` runs it, metrics, train rows and TensorBoard included."""

    def __init__(self, config: TrainConfig, data: Data, devices, folder: pathlib.Path):
        folder.mkdir()
        self._devices = devices
        with devices.scope():
            keras.utils.set_random_seed(config.seed % 2**32)
            steps_per_epoch = data.train.steps_per_epoch
            context = tasks.TaskContext(config, data.spec, _ENDLESS, steps_per_epoch, data)
            task = tasks.make_task(context)
            self._stepper = Stepper(task, devices, config)
            self._stepper.compile(data.train.element_spec())
            self._loop = Loop(
                config,
                task,
                self._stepper,
                data.train,
                None,
                Report(folder, config.tensorboard),
                Clock(),
                StopRequest(),
                lambda store, step, state: None,
                None,
                None,
            )
        self._chunk, self._chunk_steps = next(data.train.chunks())

    def step_alone(self, warmup_steps: int, num_steps: int) -> Turn:
        """Trains on one chunk again and again."""

        def run_steps(count: int) -> int:
            done = 0
            while done < count:
                outcome = self._stepper.train(self._chunk, 0, self._chunk_steps)
                bad_step = int(outcome.bad_step)  # waits for the device
                if bad_step >= 0:
                    raise NotFinite(bad_step, "the loss of one chunk, trained on again and again")
                done += self._chunk_steps
            return done

        with self._devices.scope():
            return timed(run_steps, warmup_steps, num_steps)

    def end_to_end(self, warmup_steps: int, num_steps: int) -> Turn:
        """Trains on the data, as a run does."""

        def run_steps(count: int) -> int:
            done = 0
            while done < count:
                done += self._loop.advance()
            return done

        # The log lines are written as ever, and not read here.
        with (
            self._devices.scope(),
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stderr(nowhere),
        ):
            return timed(run_steps, warmup_steps, num_steps)


# The loops of others.


def _baselines(config, data: Data, devices, folder: pathlib.Path) -> list[Variant]:
    images, labels = baselines.epoch_arrays(data.train, to_model_input)
    the_job = baselines.Job(
        lambda: tasks.make_model(config, data.spec),
        lambda: optim.make_optimizer(config, _ENDLESS, data.train.steps_per_epoch),
        images,
        labels,
        data.spec.num_classes,
        data.train.batch_size,
    )
    several = devices if devices.num_replicas_in_sync > 1 else None
    variants = []
    if config.strategy == "mirrored":
        one = dataclasses.replace(config, strategy="one_device", num_devices=0)
        training = _Training(one, data, strategy.make_strategy(one), folder / "one_device")
        in_flight = _CHUNKS_IN_FLIGHT * data.train.chunking().chunk_steps
        variants.append(Variant("one_device", training.end_to_end, in_flight))
    if several:
        run = baselines.straightforward_loop(the_job, several)
        variants.append(Variant("straightforward_loop", run))
    variants.append(Variant("textbook_slicing", baselines.textbook_slicing(the_job)))
    variants.append(Variant("textbook_gather", baselines.textbook_gather(the_job)))
    variants.append(Variant("model_fit", baselines.model_fit(the_job, several)))
    _log.info("looking for the best steps_per_execution")
    run, found = baselines.model_fit_best(the_job, several)
    return [*variants, Variant("model_fit_best", run, settings=found)]


# Turns and rows.


def _take_turns(variants: list[Variant], settings: Settings) -> dict[str, list[Turn]]:
    """Interleaves the variants' turns, so that the machine's drift hits all alike."""
    turns = {variant.name: [] for variant in variants}
    total = len(variants) * (settings.repeats + 1)
    with tqdm(total=total, desc="measuring", unit="turn", disable=None, leave=False) as bar:
        for variant in variants:
            bar.set_postfix_str(f"{variant.name}: compiling")
            _prepare(variant, settings)
            bar.update()
        for _ in range(settings.repeats):
            for variant in variants:
                bar.set_postfix_str(variant.name)
                turns[variant.name].append(variant.run(variant.warmup_steps, variant.num_steps))
                bar.update()
    return turns


def _prepare(variant: Variant, settings: Settings) -> None:
    """Compiles by running, and settles how many steps a turn has."""
    if settings.num_warmup_steps is not None:
        variant.warmup_steps = settings.num_warmup_steps
    count = _MIN_WARMUP_STEPS
    variant.run(0, count)
    if settings.num_steps:
        variant.num_steps = settings.num_steps
        return
    while (turn := variant.run(0, count)).secs < _CALIBRATION_SECS:
        count *= 4
    variant.num_steps = max(1, round(turn.steps_per_sec * _TURN_SECS))


def _rows(variants, turns, pipeline: Pipeline, context: dict[str, Any]) -> list[dict[str, Any]]:
    examples = pipeline.order.examples_per_epoch / pipeline.steps_per_epoch
    ours = [turn.steps_per_sec for turn in turns["end_to_end"]]
    rows = []
    for variant in variants:
        rates = [turn.steps_per_sec for turn in turns[variant.name]]
        rows.append(
            {
                "variant": variant.name,
                **tables.spread("steps_per_sec", rates),
                **tables.spread("examples_per_sec", [rate * examples for rate in rates]),
                **tables.ratio(ours, rates),
                "steps": round(statistics.median(turn.steps for turn in turns[variant.name])),
                "warmup_steps": variant.warmup_steps,
                "repeats": len(rates),
                "settings": variant.settings,
                **context,
            }
        )
    return [*rows, {**_summary(rows), **context}]


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Which of input and step bounds the two together, and by how much."""
    rates = {row["variant"]: row["steps_per_sec"] for row in rows}
    bound, other = sorted(("input", "step"), key=rates.get)
    factor = rates[other] / rates[bound]
    text = (
        f"the {bound} bounds: alone it makes {rates[bound]:,.1f} steps/s where the {other} alone "
        f"makes {rates[other]:,.1f}, {factor:.1f} times as many; together they make "
        f"{rates['end_to_end']:,.1f}"
    )
    return {"variant": "summary", "bound": bound, "bound_factor": factor, "text": text}
