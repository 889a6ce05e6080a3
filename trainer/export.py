"""Writes a trained model so that others can use it without this package."""

import pathlib
from collections.abc import Callable

import keras
import tensorflow as tf

from pipelines import Spec, to_model_input
from trainer.replicas import whole

PredictFn = Callable[[tf.Tensor], dict[str, tf.Tensor]]


def write(folder: str, model: keras.Model, spec: Spec, predictions: PredictFn) -> None:
    """Writes model.keras (the bare model) and saved_model (raw inputs to predictions).

    Args:
      folder: where to; made if missing.
      model: takes float32 [batch, *input_shape], scaled.
      spec: the data's spec.
      predictions: turns the model's outputs into what serves them.
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    model.save(path / "model.keras")
    serving = _Serving(model, spec, predictions)
    tf.saved_model.save(serving, str(path / "saved_model"), signatures=serving.signatures())


class _Serving(tf.Module):
    """The model with its preprocessing and postprocessing."""

    def __init__(self, model: keras.Model, spec: Spec, predictions: PredictFn):
        super().__init__()
        self._model, self._spec, self._predictions = model, spec, predictions
        self._variables: list[tf.Variable] = []

    def signatures(self) -> dict[str, Callable]:
        """`serving_default` and, for images, `serve_encoded`."""
        spec = self._spec
        raw = tf.TensorSpec([None, *spec.input_shape], spec.input_dtype, name=spec.input_key)
        found = {"serving_default": tf.function(self._serve).get_concrete_function(raw)}
        if spec.is_image and spec.input_dtype in ("uint8", "uint16"):
            encoded = tf.TensorSpec([None], tf.string, name="encoded")
            found["serve_encoded"] = tf.function(self._serve_encoded).get_concrete_function(encoded)
        # The saver wants an owner for whatever the functions read, Keras's generator included.
        read = [v for function in found.values() for v in function.graph.variables]
        self._variables = list({id(whole(v)): whole(v) for v in read}.values())
        return found

    def _serve(self, inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        outputs = self._model(to_model_input(inputs), training=False)
        return self._predictions(tf.cast(outputs, tf.float32))

    def _serve_encoded(self, encoded: tf.Tensor) -> dict[str, tf.Tensor]:
        height, width, channels = self._spec.input_shape
        dtype = tf.as_dtype(self._spec.input_dtype)

        def decode(content):
            image = tf.io.decode_image(content, channels, dtype=dtype, expand_animations=False)
            image.set_shape([None, None, channels])
            same = tf.reduce_all(tf.equal(tf.shape(image)[:2], [height, width]))
            resized = tf.cond(same, lambda: image, lambda: _resize(image, height, width))
            return tf.ensure_shape(resized, [height, width, channels])

        return self._serve(tf.map_fn(decode, encoded, fn_output_signature=dtype))


def _resize(image: tf.Tensor, height: int, width: int) -> tf.Tensor:
    resized = tf.image.resize(image, [height, width], antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(resized), 0, image.dtype.max), image.dtype)
