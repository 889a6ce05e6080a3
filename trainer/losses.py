"""Losses per example, by name. To bring another one: --loss=module:function."""

import inspect
from collections.abc import Callable

import keras
import tensorflow as tf

from pipelines import UserError, is_symbol, load_symbol

LossFn = Callable[..., tf.Tensor]

_TAKING_CLASSES = ("sparse_categorical_crossentropy", "circle")


def make_loss_fn(name: str) -> LossFn:
    """Finds a loss.

    Args:
      name: a keras.losses name such as huber, or module:function. A user's function is called with
        the labels as the dataset stores them, the outputs as the model returns them and, where it
        has parameters of these names, `model` and `step`. Those of Keras want classes one-hot
        unless they `takes_classes`.

    Returns:
      A function of (labels, outputs, model, step) that returns float32 [batch].

    Raises:
      UserError: for an unknown name.
    """
    fn = load_symbol("loss", name) if is_symbol(name) else _keras_loss(name)
    extra = [p for p in ("model", "step") if p in _parameters(fn)]

    def loss_fn(labels, outputs, model, step):
        offered = {"model": model, "step": step}
        loss = tf.convert_to_tensor(fn(labels, outputs, **{p: offered[p] for p in extra}))
        if loss.shape.rank == 2 and loss.shape[1] == 1:
            loss = loss[:, 0]
        if loss.shape.rank != 1 or not loss.shape.is_compatible_with(labels.shape[:1]):
            raise UserError(
                f"--loss={name}: must return one loss per example, shape "
                f"[{labels.shape[0]}], not {loss.shape}"
            )
        return tf.cast(loss, tf.float32)

    return loss_fn


def takes_classes(name: str) -> bool:
    """Whether a loss is called with the numbers of classes, as stored, or with one-hot labels."""
    return is_symbol(name) or _keras_key(name) in _TAKING_CLASSES


def _keras_key(name: str) -> str:
    """The name of the function in keras.losses.

    Raises:
      UserError: for an unknown name.
    """
    functions = _keras_functions()
    key = name.lower()
    if key not in functions:
        try:  # a short name such as mse, or a class such as MeanSquaredError: a function is behind
            found = keras.losses.get(name)
            key = getattr(found, "fn", found).__name__
        except (ValueError, AttributeError):
            raise UserError(
                f"--loss={name}: unknown; choose one of {', '.join(sorted(functions))}, or "
                "module:function"
            ) from None
    return key


def _keras_functions() -> dict[str, LossFn]:
    return {
        key: fn
        for key, fn in vars(keras.losses).items()
        if inspect.isfunction(fn) and key not in ("get", "serialize", "deserialize")
    }


def _keras_loss(name: str) -> LossFn:
    fn = _keras_functions()[_keras_key(name)]

    def loss_fn(labels, outputs):
        kwargs = {"from_logits": True} if "from_logits" in _parameters(fn) else {}
        if outputs.shape.num_elements() == labels.shape.num_elements():
            # As rows: Keras losses average over the last axis, and [batch] against [batch, 1]
            # would broadcast to [batch, batch].
            labels, outputs = rows(labels), rows(outputs)
        try:
            loss = fn(labels, outputs, **kwargs)
        except (ValueError, TypeError, IndexError) as error:
            raise UserError(
                f"--loss={name}: does not fit labels {labels.shape} and outputs {outputs.shape}: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error
        return loss if loss.shape.rank == 0 else tf.reduce_mean(rows(loss), axis=1)

    return loss_fn


def rows(values: tf.Tensor) -> tf.Tensor:
    """Reshapes [batch, ...] to [batch, n]."""
    return tf.reshape(values, [values.shape[0], -1])


def _parameters(fn: Callable) -> set[str]:
    try:
        return set(inspect.signature(fn).parameters)
    except ValueError:  # a builtin without a signature
        return set()
