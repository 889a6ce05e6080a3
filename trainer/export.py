"""Writes a trained model so that others can use it without this package."""

import pathlib
from collections.abc import Callable

import keras
import tensorflow as tf

from pipelines import EvaluationView, Spec, to_model_input
from trainer.replicas import whole

PredictFn = Callable[[tf.Tensor], dict[str, tf.Tensor]]


def write(folder: str, model: keras.Model, spec: Spec, predictions: PredictFn) -> None:
    """Writes saved_model (raw inputs to predictions) and, if Keras can, model.keras (the bare one).

    Args:
      folder: where to; made if missing.
      model: takes float32 [batch, *input_shape], scaled.
      spec: the data's spec.
      predictions: turns the model's outputs into what serves them.
    """
    _save(folder, model, _Serving(model, spec, predictions).signatures())


def why_not_keras(model: keras.Model) -> str | None:
    """Why a model cannot be written as model.keras, known before it is trained; None if it can."""
    try:
        keras.saving.serialize_keras_object(model)
    except Exception as error:  # a user's layers: whatever they raise
        return " ".join(str(error).partition("Please implement")[0].split())[:300]
    return None


def write_generator(folder: str, generator: keras.Model, spec: Spec) -> None:
    """Writes model.keras (latents to images in [0, 1]) and saved_model (latents to stored images).

    Args:
      folder: where to; made if missing.
      generator: takes float32 [batch, latent_dim].
      spec: the data's spec; images are served in its type.
    """
    dtype = tf.as_dtype(spec.input_dtype)

    def generate(latents):
        images = tf.cast(generator(latents, training=False), tf.float32)
        if dtype.is_integer:
            images = tf.cast(tf.round(images * dtype.max), dtype)
        return {"images": images}

    latents = tf.TensorSpec([None, *generator.input_shape[1:]], tf.float32, name="latents")
    function = tf.function(generate).get_concrete_function(latents)
    _save(folder, generator, {"serving_default": function})


def _save(folder: str, model: keras.Model, signatures: dict[str, Callable]) -> None:
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if why_not_keras(model) is None:
        model.save(path / "model.keras")
    serving = tf.Module()
    # The saver wants an owner for whatever the functions read, Keras's generator included.
    read = [v for function in signatures.values() for v in function.graph.variables]
    serving.read = list({id(whole(v)): whole(v) for v in read}.values())
    tf.saved_model.save(serving, str(path / "saved_model"), signatures=signatures)


class _Serving:
    """The model with its preprocessing and postprocessing."""

    def __init__(self, model: keras.Model, spec: Spec, predictions: PredictFn):
        self._model, self._spec, self._predictions = model, spec, predictions

    def signatures(self) -> dict[str, Callable]:
        """`serving_default` and, for images, `serve_encoded`."""
        spec = self._spec
        shape = spec.input_shape
        if shape != spec.stored_shape:  # images of any size, for a batch may have either
            shape = (None, None, shape[-1])
        raw = tf.TensorSpec([None, *shape], spec.input_dtype, name=spec.input_key)
        found = {"serving_default": tf.function(self._serve).get_concrete_function(raw)}
        if spec.is_image and spec.input_dtype in ("uint8", "uint16"):
            encoded = tf.TensorSpec([None], tf.string, name="encoded")
            found["serve_encoded"] = tf.function(self._serve_encoded).get_concrete_function(encoded)
        return found

    def _serve(self, inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        if self._spec.is_image:
            inputs = EvaluationView(self._spec).of_pixels(inputs)
        outputs = self._model(to_model_input(inputs), training=False)
        return self._predictions(tf.cast(outputs, tf.float32))

    def _serve_encoded(self, encoded: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._serve(EvaluationView(self._spec).of_encoded(encoded))
