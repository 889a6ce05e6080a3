"""The gan task: its formulas, the laws, its score, what it shows and exports."""

import dataclasses
import math
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import words
from keras import layers
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import pipelines
import trainer
from trainer import score
from trainer.tasks import TaskContext, gan, make_task

SMALL = words("--task=gan --dataset=builders:Images --batch_size=12 --log_steps=1 --latent_dim=5")
STOPPED = ("--callback=parts:terminate_at_step_7", "--steps_per_loop=1")
TIMINGS = ("seconds", "examples_per_sec", "input_wait")


def untimed(rows):
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


# Formulas.


def test_frechet_distance_of_known_gaussians():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(200_000, 2)) * [1.0, 2.0]
    b = rng.normal(size=(200_000, 2)) * [3.0, 1.0] + [4.0, 0.0]
    # Of diagonal covariances: |difference of means|^2 + sum of (difference of deviations)^2.
    assert score.frechet_distance(a, b) == pytest.approx(16 + 4 + 1, rel=0.02)
    assert score.frechet_distance(a, a) == pytest.approx(0.0, abs=1e-6)


def test_frechet_distance_of_correlated_features():
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=(50, 4)) @ rng.normal(size=(4, 4)) for _ in range(2))
    product = np.linalg.eigvals(np.cov(a, rowvar=False) @ np.cov(b, rowvar=False))
    expected = np.sum((a.mean(0) - b.mean(0)) ** 2)
    expected += a.var(0, ddof=1).sum() + b.var(0, ddof=1).sum() - 2 * np.sqrt(product.real).sum()
    assert score.frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1), (32, 64, 3), (36, 12, 3)])
def test_networks_fit_any_sides_divisible_by_4(shape):
    generator, discriminator = gan.make_generator(shape, 6), gan.make_discriminator(shape)
    images = generator(np.random.default_rng(0).normal(size=(2, 6)))
    assert images.shape == (2, *shape)
    assert 0.0 <= np.min(images) <= np.max(images) <= 1.0
    assert discriminator(images).shape == (2, 1)


def test_sample_sheet_places_images_row_by_row():
    images = np.arange(5, dtype=np.float32)[:, None, None, None] * np.ones((1, 2, 3, 1), np.float32)
    sheet = gan.sample_sheet(images + 1)
    assert sheet.shape == (6, 9, 1)
    np.testing.assert_array_equal(sheet[::2, ::3, 0], [[1, 2, 3], [4, 5, 0], [0, 0, 0]])


def linear_pair(spec):
    """A generator, and a discriminator whose gradient by the image is its weights everywhere."""
    size = math.prod(spec.input_shape)
    generator = [keras.Input([5]), layers.Dense(size, "sigmoid"), layers.Reshape(spec.input_shape)]
    discriminator = [keras.Input(spec.input_shape), layers.Flatten(), layers.Dense(1)]
    return keras.Sequential(generator), keras.Sequential(discriminator)


def linear_task(penalty, weight=None, seed=0):
    config = trainer.TrainConfig(
        task="gan", model=linear_pair, latent_dim=5, gan_penalty=penalty, gan_penalty_weight=weight
    )
    config = dataclasses.replace(config, seed=seed)
    spec = pipelines.Spec(
        input_key="image",
        input_shape=(4, 4, 1),
        input_dtype="uint8",
        label_key="label",
        label_shape=(),
        num_classes=3,
        class_names=None,
        output_shape=(3,),
        is_image=True,
        feature_keys=("image", "label"),
        stored_shape=(4, 4, 1),
    )
    return make_task(TaskContext(config, spec))


def batch_of(size):
    images = np.random.default_rng(size).integers(0, 256, (size, 4, 4, 1), np.uint8)
    return {
        "image": tf.constant(images),
        pipelines.WEIGHT: tf.ones([size]),
        pipelines.INDEX: tf.range(size, dtype=tf.int64),
    }


@pytest.mark.parametrize(
    ("penalty", "weight"), [("none", None), ("r1", None), ("gp", None), ("r1", 3.0), ("gp", 0.5)]
)
def test_losses_follow_the_formulas(penalty, weight):
    task = linear_task(penalty, weight)
    batch = task.prepare(batch_of(6), training=True)
    real = batch["image"].numpy() / 255.0
    fakes = [task.generator(batch["_latents"][:, i]).numpy() for i in (0, 1)]
    logits_of = lambda images: task.discriminator(images).numpy()[:, 0]  # noqa: E731
    norm = np.linalg.norm(task.discriminator.trainable_variables[0])
    expected = np.logaddexp(0, -logits_of(real)) + np.logaddexp(0, logits_of(fakes[0]))
    if penalty == "r1":
        expected += (weight or 1.0) * norm**2 / 2
    if penalty == "gp":
        expected += (weight or 10.0) * (norm - 1) ** 2
    loss, _ = task.discriminator_loss(batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    loss, _ = task.generator_loss(batch)
    np.testing.assert_allclose(loss, np.logaddexp(0, -logits_of(fakes[1])), rtol=1e-5)


def test_random_numbers_depend_on_seed_and_step_alone():
    def latents(seed, step, training=True):
        task = linear_task("gp", seed=seed)
        task.step.assign(step)
        batch = task.prepare(batch_of(4), training)
        return [batch[key].numpy() for key in ("_latents", "_mix") if key in batch]

    for a, b in zip(latents(1, 2), latents(1, 2), strict=True):
        np.testing.assert_array_equal(a, b)
    for other in (latents(1, 3), latents(2, 2)):
        assert all(np.all(a != b) for a, b in zip(latents(1, 2), other, strict=True))
    # An evaluation judges all states of a training by the same numbers.
    np.testing.assert_array_equal(latents(1, 2, False)[0], latents(1, 3, False)[0])


# The laws.


# Not Adam, whose first steps are of full size whatever the gradient: it blows rounding up.
SGD = words("--optimizer=sgd --learning_rate=0.002")


@pytest.mark.parametrize("penalty", ["none", "r1", "gp"])
def test_replicas_change_nothing(command, penalty):
    flags = [*SMALL, *SGD, "--train_steps=8", "--eval_steps=4", f"--gan_penalty={penalty}"]
    one = command(*flags, "--num_devices=1")
    three = command(*flags, "--num_devices=3")
    for name in ("discriminator_loss", "generator_loss", "generator_grad_norm"):
        assert three.column(name) == pytest.approx(one.column(name), rel=1e-5)
    assert three.column("score", "eval") == pytest.approx(one.column("score", "eval"), rel=1e-4)


def test_evaluation_depends_on_no_batch_size(command):
    flags = [*SMALL, *SGD, "--train_steps=1", "--num_devices=1"]
    one, *others = (command(*flags, f"--eval_batch_size={size}") for size in (1, 5, 64))
    for other in others:
        for name in ("discriminator_loss", "generator_loss"):
            expected = pytest.approx(one.column(name, "eval"), rel=1e-5)
            assert other.column(name, "eval") == expected


def test_xla_draws_the_same_latents(command):
    plain, compiled = (
        command(*SMALL, *SGD, f"--jit_compile={jit}", "--train_steps=2", "--num_devices=1")
        for jit in ("false", "true")
    )
    assert compiled.column("loss") == pytest.approx(plain.column("loss"), rel=1e-5)


def test_accumulation_changes_nothing(command):
    flags = [*SMALL, *SGD, "--train_steps=8", "--mode=train", "--num_devices=2"]
    flags += ["--gan_penalty=none"]
    whole, parts = command(*flags), command(*flags, "--grad_accum_steps=3")
    assert parts.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)


@pytest.mark.parametrize(
    ("replicas", "penalty"), [pytest.param(1, "r1", marks=pytest.mark.slow), (2, "none")]
)
def test_resume_is_exact(command, replicas, penalty):
    flags = [*SMALL, "--train_steps=11", "--eval_steps=5", f"--num_devices={replicas}"]
    flags += [f"--gan_penalty={penalty}"]
    reference = command(*flags)
    stopped = command(*flags, *STOPPED, code=143)
    resumed = command(*flags, model_dir=stopped.dir)
    assert "resumed at step 7" in resumed.err
    assert "training the classifier" not in resumed.err
    ours, theirs = resumed.variables(), reference.variables()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    for split in ("train", "eval"):
        assert untimed(resumed.rows(split)) == untimed(reference.rows(split))


# What it says, shows and exports.


@pytest.fixture(scope="module")
def trained(module_command):
    """A run with all that it can write."""
    return module_command(
        *SMALL, "--train_steps=4", "--eval_steps=2", "--tensorboard=true", "--export=true"
    )


def test_evaluates_the_untrained_and_shows_samples(trained):
    run = trained
    assert run.column("step", "eval") == [0, 2, 4]
    assert all(value > 0 for value in run.column("score", "eval"))
    assert run.column("examples", "eval") == [33, 33, 33]
    assert run.result["best"]["score"] == min(run.column("score", "eval"))
    for step in (0, 2, 4):
        sheet = tf.io.decode_png((run.dir / "samples" / f"step-{step}.png").read_bytes())
        assert sheet.shape == (6 * 8, 6 * 8, 1)  # 33 images of 8x8 pixels
    events = [
        (event.step, value.metadata.plugin_data.plugin_name)
        for path in (run.dir / "tensorboard").iterdir()
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == "samples"
    ]
    assert events == [(0, "images"), (2, "images"), (4, "images")]
    row = run.rows("train")[-1]
    assert row["loss"] == pytest.approx(row["discriminator_loss"] + row["generator_loss"])


def test_eval_mode_gives_the_same_score(trained, command):
    run = command.copy_of(trained)
    before = run.rows("eval")[-1]
    again = command(*SMALL, "--mode=eval", model_dir=run.dir)
    assert again.column("step", "eval") == [0, 2, 4]
    assert again.rows("eval")[-1]["score"] == pytest.approx(before["score"], rel=1e-6)


def test_export_serves_images_of_latents(trained):
    run = trained
    serve = tf.saved_model.load(str(run.dir / "export" / "saved_model"))
    latents = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    served = serve.signatures["serving_default"](latents=tf.constant(latents))["images"]
    assert served.shape == (3, 8, 8, 1)
    assert served.dtype == tf.uint8
    generator = keras.saving.load_model(run.dir / "export" / "model.keras")
    np.testing.assert_allclose(served, generator(latents) * 255.0, atol=0.51)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--dataset=builders:Vectors", "sides divisible by 4"),
        ("--dataset=builders:Colours16", "sides divisible by 4"),
        ("--model=parts:linear", "must return (generator, discriminator)"),
        ("--model=resnet20", "only has a meaning with a task that learns labels"),
        ("--hidden_units=8", "only has a meaning with"),
        ("--label_smoothing=0.1", "only has a meaning with a task that learns labels"),
        (
            "--gan_penalty=none --gan_penalty_weight=2",
            "only has a meaning with --task=gan and --gan_penalty",
        ),
        ("--task=classification --latent_dim=7", "only has a meaning with --task=gan"),
    ],
)
def test_what_does_not_fit_is_refused(command, flags, told):
    run = command(*SMALL[:3], "--latent_dim=64", *words(flags), code=1)
    assert told in run.error


@pytest.mark.slow
def test_training_improves_the_score_threefold_in_three_minutes(command):
    start = time.monotonic()
    run = command.process("--task=gan")
    first, *_, last = run.column("score", "eval")
    assert last < first / 3
    assert time.monotonic() - start < 180
