"""How far generated images are from real ones, as a classifier of the real ones sees them."""

import concurrent.futures
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from pipelines import WEIGHT, Data, Pipeline, UserError, to_model_input
from trainer import strategy
from trainer.config import TrainConfig
from trainer.step import Stepper
from trainer.tasks import TaskContext, make_task

_log = logging.getLogger(__name__)

_MAX_EPOCHS = 5
_MAX_STEPS = 400


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Squared Fréchet distance between Gaussians fitted to two sets of features.

    |mean_a - mean_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), Dowson and Landau 1982; with the
    features of an Inception network it is the FID of Heusel et al. 2017.

    Args:
      a, b: [n, d] and [m, d].
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    values, vectors = np.linalg.eigh(cov_a)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    # The eigenvalues of C_a C_b are those of this symmetric matrix.
    products = np.linalg.eigvalsh(root @ cov_b @ root)
    trace = np.trace(cov_a) + np.trace(cov_b) - 2.0 * np.sqrt(np.maximum(products, 0.0)).sum()
    return float(np.sum((a.mean(0) - b.mean(0)) ** 2) + trace)


class FrechetScore:
    """Fréchet distance of images from the evaluation split, in the features of a classifier.

    The classifier is trained once, by this package, on the training split, before it is first
    needed, and kept in `folder` for runs that go on. It lives on one device outside of the run's
    strategy, so that replicas make it differ by no more than its training makes of the rounding of
    an operation that has fewer threads: the scores of 1 and 2 CPU devices differed by 0.3%.
    """

    def __init__(self, data: Data, config: TrainConfig, folder: pathlib.Path):
        """Draws the classifier's weights, as every run of a seed does at this place."""
        self._data = data
        self._config = TrainConfig(
            task="classification",
            model="cnn",
            strategy="one_device",
            seed=config.seed,
            jit_compile="false",
        )
        self._folder = folder
        self._device = strategy.make_strategy(self._config)
        self._features_fn: Callable | None = None
        self._real: np.ndarray | None = None
        _outside_strategy(self._build)

    def __call__(self, images: np.ndarray) -> float:
        """The distance of float32 images [n, *input_shape] in [0, 1]; lower is better."""
        return _outside_strategy(self._score, images)

    def _build(self) -> None:
        spec = self._data.spec
        with self._device.scope():
            self._task = make_task(TaskContext(self._config, spec))
            self._stepper = Stepper(self._task, self._device, self._config)
        model = self._task.models["model"]
        features = keras.Model(model.inputs, model.get_layer("logits").input)
        self._features_fn = tf.function(lambda x: features(x, training=False), autograph=False)

    def _score(self, images: np.ndarray) -> float:
        if self._real is None:
            self._load_or_train()
            self._real = self._features_of_split()
        size = self._data.evaluation.batch_size
        return frechet_distance(self._real, in_batches(self._features_fn, images, size))

    def _features_of_split(self) -> np.ndarray:
        """Features of the evaluation split, [n, d]."""
        spec, found = self._data.spec, []
        for batch in self._data.evaluation.batches(num_epochs=1):
            features = self._features_fn(to_model_input(batch[spec.input_key]))
            found.append(features.numpy()[batch[WEIGHT].numpy() > 0])
        return np.concatenate(found)

    def _load_or_train(self) -> None:
        model = self._task.models["model"]
        path = self._folder / f"classifier-{self._identity()}.weights.h5"
        if path.exists():
            model.load_weights(path)
            return
        if self._data.train is None:
            raise UserError(f"{path}: missing, and only a run that trains can make it again")
        self._train(self._data.train)
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        model.save_weights(temporary)
        os.replace(temporary, path)

    def _identity(self) -> str:
        """Changes with what the classifier depends on."""
        parts = (self._data.name, self._data.version, self._config.seed)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]

    def _train(self, pipeline: Pipeline) -> None:
        num_steps, done = min(_MAX_STEPS, _MAX_EPOCHS * pipeline.steps_per_epoch), 0
        _log.info("training the classifier behind the score: %d steps", num_steps)
        with self._device.scope():
            for chunk, count in pipeline.chunks():
                count = min(count, num_steps - done)
                self._stepper.train(chunk, 0, count)
                done += count
                if done == num_steps:
                    break
        means, _ = self._stepper.train_sums.read()
        _log.info("the classifier's accuracy while it was trained: %.3f", means["accuracy"])


def in_batches(fn: Callable, rows: np.ndarray, size: int) -> np.ndarray:
    """Applies `fn` to batches of one size, so that it is traced once, and joins the results."""
    padded = np.resize(rows, (-(-len(rows) // size) * size, *rows.shape[1:]))
    parts = [fn(tf.constant(part)).numpy() for part in np.split(padded, len(padded) // size)]
    return np.concatenate(parts)[: len(rows)]


def _outside_strategy(fn: Callable, *args):
    """Calls a function in a thread of its own: a strategy's scope belongs to its thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(fn, *args).result()
