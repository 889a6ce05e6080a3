"""The plain loops that people would write instead, for `trainer.benchmark --compare`.

Each loop trains the same model on the same batches with the same optimizer, the way tutorials do.
A loop goes on where its last turn stopped: `run(warmup_steps, num_steps)` trains the first steps
off the clock and returns a `Turn` of those on it.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from pipelines import Pipeline

_CALL_STEPS = (16, 64, 256)
_CALL_STEPS_OF_SLOW = (4,)
_SLOW_STEP_SECS = 0.05  # beside such a step, calling it costs little


@dataclasses.dataclass(frozen=True)
class Turn:
    """Steps taken and the seconds they took."""

    steps: int
    secs: float

    @property
    def steps_per_sec(self) -> float:
        return self.steps / self.secs


RunFn = Callable[[int, int], Turn]


@dataclasses.dataclass(frozen=True)
class Job:
    """What a loop trains.

    Attributes:
      make_model: returns a new model with logits [batch, num_classes].
      make_optimizer: returns a new optimizer.
      images: float32 [n, *input_shape], scaled, n a multiple of `batch_size`.
      labels: int64 [n].
      num_classes: number of classes.
      batch_size: examples of a step over all replicas.
    """

    make_model: Callable[[], keras.Model]
    make_optimizer: Callable[[], keras.optimizers.Optimizer]
    images: np.ndarray
    labels: np.ndarray
    num_classes: int
    batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        return len(self.images) // self.batch_size


def epoch_arrays(pipeline: Pipeline, scale_fn: Callable) -> tuple[np.ndarray, np.ndarray]:
    """One epoch of whole batches as (float32 inputs, int64 labels), in the pipeline's order."""
    spec = pipeline.spec
    count = pipeline.num_examples // pipeline.batch_size * pipeline.batch_size
    images = np.empty([count, *spec.input_shape], np.float32)
    labels = np.empty([count], np.int64)
    size = pipeline.batch_size
    for index, batch in enumerate(pipeline.batches(num_epochs=1).take(count // size)):
        rows = slice(index * size, (index + 1) * size)
        images[rows] = scale_fn(batch[spec.input_key])
        labels[rows] = batch[spec.label_key]
    return images, labels


def timed(run_steps: Callable[[int], int], warmup_steps: int, num_steps: int) -> Turn:
    """Times `run_steps(count)`, which takes at least `count` steps and returns how many."""
    run_steps(warmup_steps)
    start = time.perf_counter()
    steps = run_steps(num_steps)
    return Turn(steps, time.perf_counter() - start)


@contextlib.contextmanager
def _printing_to_nowhere() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


# The textbook loops.


def textbook_slicing(job: Job) -> RunFn:
    """Slices numpy arrays and prints each batch's loss."""
    train_step = _textbook_step(job)

    def batches():
        while True:
            for first in range(0, len(job.images), job.batch_size):
                rows = slice(first, first + job.batch_size)
                yield job.images[rows], job.labels[rows]

    return _printing_loop(train_step, batches())


def textbook_gather(job: Job) -> RunFn:
    """Shuffles all examples with `tf.gather` each epoch, slices, and prints each batch's loss."""
    train_step = _textbook_step(job)
    images, labels = tf.constant(job.images), tf.constant(job.labels)

    def batches():
        while True:
            order = tf.random.shuffle(tf.range(len(job.images)))
            shuffled_images, shuffled_labels = tf.gather(images, order), tf.gather(labels, order)
            for first in range(0, len(job.images), job.batch_size):
                rows = slice(first, first + job.batch_size)
                yield shuffled_images[rows], shuffled_labels[rows]

    return _printing_loop(train_step, batches())


def _textbook_step(job: Job) -> Callable:
    model, optimizer = job.make_model(), job.make_optimizer()
    optimizer.build(model.trainable_variables)

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            probabilities = tf.nn.softmax(model(images, training=True))
            one_hot = tf.one_hot(labels, job.num_classes)
            losses = keras.losses.categorical_crossentropy(one_hot, probabilities)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return train_step


def _printing_loop(train_step: Callable, batches: Iterator) -> RunFn:
    taken = 0

    def run_steps(count: int) -> int:
        nonlocal taken
        for _ in range(count):
            loss = train_step(*next(batches))
            taken += 1
            print(f"step {taken}: loss {float(loss):.4f}")
        return count

    def run(warmup_steps: int, num_steps: int) -> Turn:
        with _printing_to_nowhere():
            return timed(run_steps, warmup_steps, num_steps)

    return run


# The straightforward distributed loop.


def straightforward_loop(job: Job, strategy: tf.distribute.Strategy) -> RunFn:
    """`experimental_distribute_dataset`, and one `strategy.run` in a `tf.function` per step."""
    with strategy.scope():
        model, optimizer = job.make_model(), job.make_optimizer()
        optimizer.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices((job.images, job.labels))
    dataset = dataset.shuffle(len(job.images)).repeat().batch(job.batch_size, drop_remainder=True)
    batches = iter(strategy.experimental_distribute_dataset(dataset.prefetch(tf.data.AUTOTUNE)))

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=job.batch_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(images, labels):
        losses = strategy.run(replica_step, args=(images, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def run_steps(count: int) -> int:
        total = 0.0
        for _ in range(count):
            total += train_step(*next(batches))
        float(total)  # waits for the device
        return count

    def run(warmup_steps: int, num_steps: int) -> Turn:
        with strategy.scope():
            return timed(run_steps, warmup_steps, num_steps)

    return run


# Keras.


def model_fit(
    job: Job,
    strategy: tf.distribute.Strategy | None,
    steps_per_execution: int = 1,
    jit_compile: bool | str = "auto",
) -> RunFn:
    """`model.fit` on numpy arrays, silent, with the accuracy as its metric.

    Args:
      job: what to train.
      strategy: None: on the default device.
      steps_per_execution, jit_compile: see `keras.Model.compile`.
    """
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = job.make_model()
        model.compile(
            job.make_optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
        )

    # Whole executions: the clock can start between two of them only, and of one cut short at the
    # end of an epoch Keras says that it took all its steps.
    whole_epoch = job.steps_per_epoch // steps_per_execution * steps_per_execution
    rows = slice(whole_epoch * job.batch_size)

    def run(warmup_steps: int, num_steps: int) -> Turn:
        warmup_steps = _ceil_to(steps_per_execution, warmup_steps)
        stopwatch = _Stopwatch(warmup_steps)
        steps = warmup_steps + _ceil_to(steps_per_execution, num_steps)
        epoch = min(whole_epoch, steps)
        model.fit(
            job.images[rows],
            job.labels[rows],
            batch_size=job.batch_size,
            epochs=-(-steps // epoch),
            steps_per_epoch=None if epoch == whole_epoch else epoch,
            callbacks=[stopwatch],
            verbose=0,
        )
        return stopwatch.turn()

    return run


def model_fit_best(job: Job, strategy: tf.distribute.Strategy | None) -> tuple[RunFn, str]:
    """`model.fit` with the fastest of several `steps_per_execution`, with XLA or without.

    Returns:
      (the loop, its settings in words).
    """
    tried = {}

    def try_out(steps: int, jit: bool) -> None:
        steps = min(steps, job.steps_per_epoch)
        if (steps, jit) not in tried:
            run = model_fit(job, strategy, steps, jit)
            run(0, steps)  # compiles
            tried[steps, jit] = run(steps, 4 * steps).steps_per_sec, run

    jits = (True, False) if strategy is None else (False,)
    plain = model_fit(job, strategy, jit_compile=False)
    plain(0, 1)
    is_slow = plain(1, 2).steps_per_sec * _SLOW_STEP_SECS < 1.0
    first, *others = _CALL_STEPS_OF_SLOW if is_slow else _CALL_STEPS
    for jit in jits:
        try_out(first, jit)
    (_, jit) = max(tried, key=lambda settings: tried[settings][0])
    for steps in others:
        try_out(steps, jit)
    best = max(tried, key=lambda settings: tried[settings][0])
    return tried[best][1], f"steps_per_execution={best[0]}, jit_compile={best[1]}"


class _Stopwatch(keras.callbacks.Callback):
    """Times the steps of a fit after the first `warmup_steps`, without the fit's own start-up."""

    def __init__(self, warmup_steps: int):
        super().__init__()
        self._warmup_steps = warmup_steps
        self._steps_of_past_epochs = self._taken = 0
        self._first_timed: int | None = None
        self._start = self._stop = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        if self._first_timed is None and self._taken >= self._warmup_steps:
            self._first_timed, self._start = self._taken, time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._taken = self._steps_of_past_epochs + batch + 1

    def on_epoch_end(self, epoch, logs=None):
        self._steps_of_past_epochs = self._taken
        self._stop = time.perf_counter()

    def turn(self) -> Turn:
        return Turn(self._taken - self._first_timed, self._stop - self._start)


def _ceil_to(unit: int, number: int) -> int:
    return -(-number // unit) * unit
