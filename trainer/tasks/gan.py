"""Generative adversarial networks: two networks, two optimizers (Goodfellow et al. 2014)."""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from pipelines import (
    INDEX,
    WEIGHT,
    Spec,
    UserError,
    call_symbol,
    is_symbol,
    randomness,
    symbol_name,
)
from trainer import export, optim
from trainer.config import TrainConfig
from trainer.score import FrechetScore, in_batches
from trainer.tasks import base

_LATENTS = (
    "_latents"  # float32 [batch, 2, latent_dim]: of the discriminator's, the generator's step
)
_MIX = "_mix"  # float32 [batch, 1, 1, 1] in [0, 1): where gp measures between real and generated
_MIX_SALT = 0x6D6978
_SHEET_SALT = 0x73686574
_FILTERS = 16  # of the layers next to the image; each farther one has twice as many
_PENALTY_WEIGHTS = {"none": 0.0, "r1": 1.0, "gp": 10.0}
_SHEET_SIDE = 8  # images along a side of the sample sheet
# Of Adam. The slow momentum is that of Radford et al. 2015, section 4; with R1 a rate ten times
# theirs is stable for networks this small: on mnist_5k the score fell from 522 to 95 in 150 steps
# of 128, where their 2e-4 needed 600.
_LEARNING_RATE, _BETA_1 = 2e-3, 0.5


class Gan(base.Task):
    """A generator of images and a discriminator, with the non-saturating loss.

    Each step updates the discriminator, then the generator, on latents of their own. Everything
    random is drawn for the whole batch by (seed, step).
    """

    best_metric = "score"
    lower_is_better = ("score",)
    evaluates_untrained = True

    def build(self) -> None:
        self._check_data()
        weight = self.config.gan_penalty_weight
        self._penalty_weight = (
            _PENALTY_WEIGHTS[self.config.gan_penalty] if weight is None else weight
        )
        self._score = None
        if self.report is not None and self.data is not None and self.data.evaluation is not None:
            self._score = FrechetScore(self.data, self.config, self.report.model_dir / "score")
        generator, discriminator = make_models(self.config, self.spec)
        self.generator = self.add_model("generator", generator)
        self.discriminator = self.add_model("discriminator", discriminator)
        self.add_update(
            self.discriminator_loss, discriminator, self._make_optimizer(), "discriminator"
        )
        self.add_update(self.generator_loss, generator, self._make_optimizer(), "generator")
        self._generate_fn = tf.function(self._generate, autograph=False)

    def _check_data(self) -> None:
        spec = self.spec
        if not spec.is_image or spec.input_shape[0] % 4 or spec.input_shape[1] % 4:
            raise UserError(
                "--task=gan: generates images with sides divisible by 4, but "
                f"{spec.input_key!r} has shape {spec.input_shape}"
            )
        if spec.num_classes is None:
            raise UserError(
                f"--task=gan: its score needs classes, and label {spec.label_key!r} is none"
            )

    def _make_optimizer(self) -> keras.optimizers.Optimizer:
        config = self.config
        is_default = config.optimizer == "adam"
        if is_default and config.learning_rate is None:
            config = dataclasses.replace(config, learning_rate=_LEARNING_RATE)
        optimizer = optim.make_optimizer(config, self.total_steps, self.steps_per_epoch)
        if is_default:
            optimizer.beta_1 = _BETA_1
        return optimizer

    # Training.

    def prepare(self, batch: base.Batch, training: bool) -> base.Batch:
        size, dim = batch[WEIGHT].shape[0], self.config.latent_dim
        # Evaluation has a stream of its own, by which each example is always judged alike.
        rows = tf.range(size, dtype=tf.int64) if training else batch[INDEX]
        steps = tf.fill([size], self.step if training else tf.constant(-1, tf.int64))
        seeds = randomness.example_seeds(self.config.seed, steps, rows)
        latents = tf.reshape(randomness.normal(seeds, 2 * dim), [size, 2, dim])
        batch = {**batch, _LATENTS: latents}
        if self.config.gan_penalty == "gp" and training:
            mix = randomness.uniform(randomness.salted(seeds, _MIX_SALT), 0)
            batch[_MIX] = tf.reshape(mix, [size, 1, 1, 1])
        return batch

    def discriminator_loss(self, batch: base.Batch) -> tuple[tf.Tensor, base.Values]:
        """-log D(x) - log(1 - D(G(z))) of each example, and the penalty."""
        real = self.inputs(batch)
        fake = tf.stop_gradient(self.generate(batch[_LATENTS][:, 0], training=True))
        logits = self.judge(tf.concat([real, fake], 0), training=True)
        on_real, on_fake = tf.split(logits, 2)
        loss = tf.nn.softplus(-on_real) + tf.nn.softplus(on_fake)
        right = tf.cast(on_real > 0, tf.float32) + tf.cast(on_fake < 0, tf.float32)
        values = {"accuracy": right / 2.0}
        if self._penalty_weight:
            values["penalty"] = self._penalty(batch, real, fake)
            loss += self._penalty_weight * values["penalty"]
        return loss, values

    def generator_loss(self, batch: base.Batch) -> tuple[tf.Tensor, base.Values]:
        """-log D(G(z)) of each example: the non-saturating loss."""
        fake = self.generate(batch[_LATENTS][:, 1], training=True)
        return tf.nn.softplus(-self.judge(fake, training=True)), {}

    def _penalty(self, batch: base.Batch, real: tf.Tensor, fake: tf.Tensor) -> tf.Tensor:
        """Of the discriminator's gradient by its input, float32 [batch].

        r1: half its squared norm at real images (Mescheder et al. 2018, equation 9); gp: the
        squared distance of its norm from 1 between real and generated ones (Gulrajani et al. 2017,
        equation 3).
        """
        is_r1 = self.config.gan_penalty == "r1"
        images = real if is_r1 else real + batch[_MIX] * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(images)
            logits = self.judge(images, training=True)
        squares = tf.reduce_sum(tf.square(tape.gradient(logits, images)), axis=[1, 2, 3])
        return squares / 2.0 if is_r1 else tf.square(tf.sqrt(squares + 1e-12) - 1.0)

    def generate(self, latents: tf.Tensor, training: bool) -> tf.Tensor:
        """Images, float32 [batch, *input_shape] in [0, 1], of latents [batch, latent_dim]."""
        return tf.cast(self.generator(latents, training=training), tf.float32)

    def judge(self, images: tf.Tensor, training: bool) -> tf.Tensor:
        """The discriminator's logits that images are real, float32 [batch]."""
        return tf.cast(self.discriminator(images, training=training), tf.float32)[:, 0]

    # Evaluation.

    def evaluate(self, batch: base.Batch) -> base.Values:
        fake = self.generate(batch[_LATENTS][:, 0], training=False)
        on_real, on_fake = self.judge(self.inputs(batch), False), self.judge(fake, False)
        discriminator_loss = tf.nn.softplus(-on_real) + tf.nn.softplus(on_fake)
        generator_loss = tf.nn.softplus(-on_fake)
        return {
            "loss": discriminator_loss + generator_loss,
            "discriminator_loss": discriminator_loss,
            "generator_loss": generator_loss,
        }

    def finish_evaluation(self, metrics: dict[str, float]) -> dict[str, float]:
        if self._score is None:
            return metrics
        count = self.data.evaluation.num_examples
        seed = [self.config.seed % 2**31, _SHEET_SALT]
        latents = tf.random.stateless_normal([count, self.config.latent_dim], seed).numpy()
        images = in_batches(self._generate_fn, latents, self.data.evaluation.batch_size)
        self._write_samples(images)
        return {**metrics, "score": self._score(images)}

    def _generate(self, latents: tf.Tensor) -> tf.Tensor:
        return self.generate(latents, training=False)

    def _write_samples(self, images: np.ndarray) -> None:
        """Shows the first images, always of the same latents, as a sheet."""
        step = int(self.step.numpy())
        sheet = tf.constant(np.uint8(np.round(255.0 * sample_sheet(images))))
        folder = self.report.model_dir / "samples"
        folder.mkdir(exist_ok=True)
        tf.io.write_file(str(folder / f"step-{step}.png"), tf.io.encode_png(sheet))
        if self.config.training:
            self.report.image("samples", sheet, step)

    def export(self, folder: str) -> None:
        export.write_generator(folder, self.generator, self.spec)


def sample_sheet(images: np.ndarray) -> np.ndarray:
    """Arranges up to 64 images [n, height, width, channels] in a square; missing ones are 0."""
    height, width, channels = images.shape[1:]
    side = min(_SHEET_SIDE, math.ceil(math.sqrt(len(images))))
    cells = np.zeros((side * side, height, width, channels), images.dtype)
    cells[: len(images)] = images[: side * side]
    rows = cells.reshape(side, side, height, width, channels).swapaxes(1, 2)
    return rows.reshape(side * height, side * width, channels)


# The networks.


def make_models(config: TrainConfig, spec: Spec) -> tuple[keras.Model, keras.Model]:
    """(generator, discriminator): small ones, or what --model=module:function returns for a spec.

    Raises:
      UserError: if these are not two models that fit each other and the data.
    """
    shape, dim = spec.input_shape, config.latent_dim
    if not is_symbol(config.model):
        return make_generator(shape, dim), make_discriminator(shape)
    found = call_symbol("model", config.model, spec)
    fits = (
        isinstance(found, tuple)
        and [type(model).__mro__.count(keras.Model) for model in found] == [1, 1]
        and found[0].input_shape == (None, dim)
        and found[0].output_shape == found[1].input_shape == (None, *shape)
        and found[1].output_shape == (None, 1)
    )
    if not fits:
        raise UserError(
            f"--model={symbol_name(config.model)}: must return (generator, discriminator), models "
            f"from [batch, {dim}] (--latent_dim) to [batch, {', '.join(map(str, shape))}] and from "
            "there to [batch, 1]"
        )
    return found


def num_halvings(height: int, width: int) -> int:
    """How often both sides can be halved, at least twice, to no less than 4 pixels."""
    count = 2
    while all(
        side % 2 ** (count + 1) == 0 and side >> (count + 1) >= 4 for side in (height, width)
    ):
        count += 1
    return count


def make_generator(shape: tuple[int, int, int], latent_dim: int) -> keras.Model:
    """Latents [batch, latent_dim] to images [batch, *shape] in [0, 1], doubling the sides."""
    height, width, channels = shape
    count = num_halvings(height, width)
    base_shape = (height >> count, width >> count, _FILTERS << (count - 1))
    x = inputs = keras.Input([latent_dim], name="latents")
    x = layers.Dense(math.prod(base_shape), activation="relu", name="project")(x)
    x = layers.Reshape(base_shape, name="grid")(x)
    for stage in range(1, count):
        filters = _FILTERS << (count - 1 - stage)
        x = _up(filters, "relu", f"up{stage}")(x)
    return keras.Model(inputs, _up(channels, "sigmoid", f"up{count}")(x), name="generator")


def _up(filters: int, activation: str, name: str) -> layers.Layer:
    # The kernel is a multiple of the stride: all pixels are written equally often.
    return layers.Conv2DTranspose(
        filters, 4, strides=2, padding="same", activation=activation, name=name
    )


def make_discriminator(shape: tuple[int, int, int]) -> keras.Model:
    """Images [batch, *shape] in [0, 1] to logits [batch, 1] by convolutions of stride 2.

    There is no batch norm: the penalties are of each example's own gradient.
    """
    count = num_halvings(*shape[:2])
    inputs = keras.Input(shape, name="images")
    x = layers.Rescaling(2.0, offset=-1.0, name="center")(inputs)
    for stage in range(1, count + 1):
        x = layers.Conv2D(
            _FILTERS << (stage - 1), 4, strides=2, padding="same", name=f"down{stage}"
        )(x)
        x = layers.LeakyReLU(0.2, name=f"down{stage}_relu")(x)
    logits = layers.Dense(1, dtype="float32", name="logits")(layers.Flatten(name="flatten")(x))
    return keras.Model(inputs, logits, name="discriminator")
