"""Classification and regression: one model, one optimizer, one loss per example."""

import logging
from collections.abc import Callable

import keras
import tensorflow as tf

from pipelines import UserError, load_symbol, symbol_name
from trainer import export, losses
from trainer.report import refuse_fields
from trainer.tasks import base

_log = logging.getLogger(__name__)


class Supervised(base.Task):
    """What classification and regression share."""

    default_loss: str
    own_metrics: tuple[str, ...]

    def build(self) -> None:
        config = self.config
        self._metric_fns = self._load_metrics()
        self.model = self.add_model("model", base.make_model(config, self.spec))
        self._check_output()
        unsavable = config.export and export.why_not_keras(self.model)
        if unsavable:
            _log.warning("export/ will hold saved_model alone, no model.keras: %s", unsavable)
        self._loss_fn = losses.make_loss_fn(config.loss or self.default_loss)
        self._regularizer = config.regularizer and load_symbol("regularizer", config.regularizer)
        self.add_update(self.loss, self.model, penalty_fn=self.penalty)

    def loss(self, batch: base.Batch) -> tuple[tf.Tensor, base.Values]:
        """Loss per example and metrics of a training batch."""
        outputs = self.outputs(batch, training=True)
        return self.loss_per_example(batch, outputs), self.metrics(batch, outputs)

    def evaluate(self, batch: base.Batch) -> base.Values:
        outputs = self.outputs(batch, training=False)
        loss = self.loss_per_example(batch, outputs) + self.penalty()
        return {"loss": loss, **self.metrics(batch, outputs)}

    def penalty(self) -> tf.Tensor:
        """Regularisation: the model's own losses, --l2 and --regularizer; a scalar."""
        penalty = base.add_losses(self.model.losses)
        if self.config.l2:
            kernels = [v for v in self.model.trainable_variables if len(v.shape) > 1]
            squares = [tf.reduce_sum(tf.square(tf.cast(v, tf.float32))) for v in kernels]
            penalty += self.config.l2 * tf.add_n(squares)
        if self._regularizer:
            term = tf.convert_to_tensor(self._regularizer(self.model))
            if term.shape.rank != 0:
                raise UserError(
                    f"--regularizer={symbol_name(self.config.regularizer)}: must return a scalar, "
                    f"not shape {term.shape}"
                )
            penalty += tf.cast(term, tf.float32)
        return penalty

    def outputs(self, batch: base.Batch, training: bool) -> tf.Tensor:
        """What the model returns, in float32."""
        return tf.cast(self.model(self.inputs(batch), training=training), tf.float32)

    def loss_per_example(self, batch: base.Batch, outputs: tf.Tensor) -> tf.Tensor:
        """float32 [batch]."""
        return self._loss_fn(self.labels(batch), outputs, self.model, self.step)

    def metrics(self, batch: base.Batch, outputs: tf.Tensor) -> base.Values:
        """Metrics per example."""
        labels = self.labels(batch)
        return {name: fn(labels, outputs) for name, fn in self._metric_fns.items()}

    def export(self, folder: str) -> None:
        export.write(folder, self.model, self.spec, self.predictions)

    def predictions(self, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        """What the exported model returns for its outputs."""
        raise NotImplementedError

    def _load_metrics(self) -> dict[str, Callable]:
        found = {}
        for name in self.config.metrics:
            fn = load_symbol("metrics", name)
            called = symbol_name(name).rpartition(":")[2]
            if called in (*found, *self.own_metrics, "loss"):
                raise UserError(f"--metrics={symbol_name(name)}: there is a {called!r} already")
            found[called] = fn
        refuse_fields(found, "--metrics")
        return found

    def _check_output(self) -> None:
        name, inputs = symbol_name(self.config.model), tuple(self.spec.input_shape)
        try:
            outputs = self.model.compute_output_spec(keras.KerasTensor((1, *inputs)))
        except Exception as error:  # a user's model: whatever it raises
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"--model={name}: takes no inputs of shape {inputs}: {reason}"
            ) from error
        if not isinstance(outputs, keras.KerasTensor):
            raise UserError(f"--model={name}: must return one tensor, not {outputs}")
        shape, expected = tuple(outputs.shape[1:]), self.spec.output_shape
        if shape != expected and not (shape == (1,) and expected == ()):
            raise UserError(
                f"--model={name}: outputs shape {shape} where {self.spec.label_key!r} needs "
                f"{expected}"
            )


class Classification(Supervised):
    """Labels are classes, outputs logits [batch, num_classes]."""

    best_metric = "accuracy"
    own_metrics = ("accuracy",)
    default_loss = "sparse_categorical_crossentropy"

    def build(self) -> None:
        weights = self.config.class_weights
        if self.spec.num_classes is None:
            raise UserError(
                f"--task=classification: label {self.spec.label_key!r} is not an integer class; "
                "choose --task=regression"
            )
        if weights and len(weights) != self.spec.num_classes:
            raise UserError(
                f"--class_weights has {len(weights)} numbers for {self.spec.num_classes} classes"
            )
        self._mix_fn = self.data.mix_fn if self.data else None
        if self.config.loss and (self.config.label_smoothing or self._mix_fn):
            raise UserError(
                "--label_smoothing, mixup and cutmix belong to the default loss: leave --loss out"
            )
        if self._mix_fn:
            self._check_pairs()
        super().build()

    def _check_pairs(self) -> None:
        """Examples are mixed in pairs, which must not be parted between replicas."""
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        size, parts = self.data.train.batch_size, replicas * self.config.grad_accum_steps
        if size % (2 * parts):
            raise UserError(
                f"--augment: mixup and cutmix mix pairs, but --batch_size={size} leaves "
                f"{size // parts} examples to each of {parts} parts, an odd number"
            )

    def loss(self, batch: base.Batch) -> tuple[tf.Tensor, base.Values]:
        if not self._mix_fn:
            return super().loss(batch)
        seed = tf.stack([tf.cast(self.step, tf.int32), self.config.seed % 2**31])
        inputs, targets = self._mix_fn(self.inputs(batch), self._one_hot(batch), seed)
        outputs = tf.cast(self.model(inputs, training=True), tf.float32)
        return self._cross_entropy(targets, outputs), self.metrics(batch, outputs)

    def loss_per_example(self, batch: base.Batch, outputs: tf.Tensor) -> tf.Tensor:
        one_hot = self._one_hot(batch)
        if not self.config.loss:
            return self._cross_entropy(one_hot, outputs)
        labels = self.labels(batch) if losses.takes_classes(self.config.loss) else one_hot
        return self._loss_fn(labels, outputs, self.model, self.step) * self._weights(one_hot)

    def _one_hot(self, batch: base.Batch) -> tf.Tensor:
        """float32 [batch, num_classes]."""
        return tf.one_hot(self.labels(batch), self.spec.num_classes)

    def _cross_entropy(self, targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Of soft labels [batch, num_classes] and logits, smoothed and weighted by the flags."""
        smoothing = self.config.label_smoothing
        smoothed = targets * (1.0 - smoothing) + smoothing / self.spec.num_classes
        loss = tf.nn.softmax_cross_entropy_with_logits(smoothed, outputs)
        return loss * self._weights(targets)

    def _weights(self, targets: tf.Tensor) -> tf.Tensor | float:
        """--class_weights of soft labels [batch, num_classes]."""
        weights = self.config.class_weights
        return tf.linalg.matvec(targets, tf.constant(weights, tf.float32)) if weights else 1.0

    def metrics(self, batch: base.Batch, outputs: tf.Tensor) -> base.Values:
        labels = self.labels(batch)
        correct = tf.equal(tf.argmax(outputs, axis=-1), tf.cast(labels, tf.int64))
        return {"accuracy": tf.cast(correct, tf.float32), **super().metrics(batch, outputs)}

    def predictions(self, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"probabilities": tf.nn.softmax(outputs), "class": tf.argmax(outputs, axis=-1)}


class Regression(Supervised):
    """Labels are numbers, outputs predictions of their shape."""

    best_metric = "loss"
    own_metrics = ("mse", "mae")
    default_loss = "mean_squared_error"

    def build(self) -> None:
        if self.config.label_smoothing or self.config.class_weights:
            raise UserError("--label_smoothing and --class_weights need --task=classification")
        if self.data and self.data.mix_fn:
            raise UserError("--augment: mixup and cutmix need --task=classification")
        super().build()

    def labels(self, batch: base.Batch) -> tf.Tensor:
        return tf.cast(super().labels(batch), tf.float32)

    def metrics(self, batch: base.Batch, outputs: tf.Tensor) -> base.Values:
        errors = losses.rows(outputs) - losses.rows(self.labels(batch))
        return {
            "mse": tf.reduce_mean(tf.square(errors), axis=1),
            "mae": tf.reduce_mean(tf.abs(errors), axis=1),
            **super().metrics(batch, outputs),
        }

    def predictions(self, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"prediction": tf.reshape(outputs, [-1, *self.spec.output_shape])}
