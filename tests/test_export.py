"""The export: usable with tensorflow alone, and equal to the live model."""

import json
import subprocess
import sys

import builders
import keras
import numpy as np
import parts
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from conftest import words

import pipelines

UNEXPORTED = words(
    "--dataset=builders:Vectors --task=parts:Unexported --model=parts:linear --batch_size=6 "
    "--train_steps=2 --num_devices=1 --export=true"
)
RUNS = {
    "two_replicas": "--dataset=builders:Images --model=parts:conv --num_devices=2",
    "averaged": "--dataset=builders:Images --model=cnn --ema_decay=0.5 --num_devices=2",
    "colours16": "--dataset=builders:Colours16 --model=parts:conv --num_devices=2",
    "half": "--dataset=builders:Images --model=cnn --mixed_precision_policy=mixed_bfloat16 "
    "--num_devices=1",
    "regression": "--dataset=builders:Line --model=parts:linear --num_devices=2",
}
COMMON = words(
    "--batch_size=6 --train_steps=4 --learning_rate=0.01 --export=true --callback=parts:probe"
)
# Runs where neither this package nor Keras's own loading is at hand.
READER = """
import sys, json
import numpy as np
import tensorflow as tf
for folder, key, inputs in json.load(open("jobs.json")):
    model = tf.saved_model.load(folder + "/saved_model")
    data = np.load(inputs + ".npz")
    out = model.signatures["serving_default"](**{key: tf.constant(data["raw"])})
    saved = {name: value.numpy() for name, value in out.items()}
    if "serve_encoded" in model.signatures:
        encoded = [tf.io.encode_png(image).numpy() for image in data["raw"]]
        out = model.signatures["serve_encoded"](encoded=tf.constant(encoded))
        saved |= {"encoded_" + name: value.numpy() for name, value in out.items()}
    np.savez(inputs + "_out.npz", **saved)
assert not {"trainer", "pipelines"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def exported(module_command, data_dir, tmp_path_factory):
    """name -> (run, raw inputs, the live model's outputs, what a fresh process got)."""
    folder = tmp_path_factory.mktemp("reader")
    jobs, live = [], {}
    for name, flags in RUNS.items():
        run = module_command(*COMMON, *words(flags))
        config = pipelines.DataConfig(
            dataset=words(flags)[0].partition("=")[2], data_dir=str(data_dir), eval_batch_size=9
        )
        data = pipelines.load_data(config, training=False)
        batch = next(iter(data.evaluation.batches(num_epochs=1)))
        raw = batch[data.spec.input_key]
        model = parts.PROBE["model"]
        outputs = model(pipelines.to_model_input(raw), training=False).numpy()
        live[name] = (run, raw.numpy(), outputs)
        np.savez(folder / f"{name}.npz", raw=raw.numpy())
        jobs.append((str(run.dir / "export"), data.spec.input_key, name))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, "-c", READER], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {name: (*live[name], np.load(folder / f"{name}_out.npz")) for name in RUNS}


@pytest.mark.parametrize("name", ["two_replicas", "colours16"])
def test_fresh_process_predicts_what_the_live_model_does(exported, name):
    _, raw, logits, served = exported[name]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert len(raw) == 9
    for prefix in ("", "encoded_"):
        np.testing.assert_allclose(served[f"{prefix}probabilities"], probabilities, atol=1e-5)
        np.testing.assert_array_equal(served[f"{prefix}class"], logits.argmax(1))


def test_half_precision_is_served_as_trained(exported):
    _, _, logits, served = exported["half"]
    np.testing.assert_array_equal(served["class"], logits.argmax(1))
    np.testing.assert_allclose(served["probabilities"].sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(served["encoded_probabilities"], served["probabilities"], atol=1e-5)


def test_regression_serves_predictions(exported):
    _, _, outputs, served = exported["regression"]
    assert served["prediction"].shape == (9,)
    np.testing.assert_allclose(served["prediction"], outputs[:, 0], atol=1e-5)
    assert set(served) == {"prediction"}


def test_average_is_what_is_exported(exported):
    run, _, logits, served = exported["averaged"]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert np.abs(served["probabilities"] - probabilities).max() > 1e-5  # not the raw weights
    model = keras.saving.load_model(run.dir / "export/model.keras", compile=False)
    raw = exported["averaged"][1]
    again = tf.nn.softmax(model(pipelines.to_model_input(tf.constant(raw)))).numpy()
    np.testing.assert_allclose(served["probabilities"], again, atol=1e-5)


@pytest.mark.parametrize("name", ["two_replicas", "regression"])
def test_keras_file_is_the_bare_model(exported, name):
    run, raw, outputs, _ = exported[name]
    model = keras.saving.load_model(run.dir / "export/model.keras", compile=False, safe_mode=True)
    scaled = pipelines.to_model_input(tf.constant(raw))
    np.testing.assert_allclose(model(scaled).numpy(), outputs, atol=1e-5)


@pytest.mark.parametrize(
    ("dataset", "size"), [("Wide", None), ("Wide", 8), ("Colours16", 7), ("Sizes", 16)]
)
def test_images_are_shown_as_in_evaluation(command, data_dir, dataset, size):
    flags = [f"--dataset=builders:{dataset}", *([f"--image_size={size}"] if size else [])]
    run = command(*COMMON, *flags, "--model=parts:linear", "--num_devices=1")
    config = pipelines.DataConfig(
        dataset=f"builders:{dataset}", data_dir=str(data_dir), image_size=size, eval_batch_size=12
    )
    data = pipelines.load_data(config, training=False)
    batch = next(iter(data.evaluation.batches(num_epochs=1)))
    stored = stored_images(data_dir, dataset)
    shown = batch["image"][: len(stored)]
    logits = parts.PROBE["model"](pipelines.to_model_input(shown), training=False)
    expected = tf.nn.softmax(logits).numpy()
    serve = tf.saved_model.load(str(run.dir / "export/saved_model")).signatures

    def check(served, rows):
        np.testing.assert_allclose(served["probabilities"], expected[rows], atol=1e-6)
        np.testing.assert_array_equal(served["class"], expected[rows].argmax(1))

    shown_again = pipelines.EvaluationView(data.spec).of_encoded(tf.constant(stored))
    np.testing.assert_array_equal(shown_again, shown)
    check(serve["serve_encoded"](encoded=tf.constant(stored)), slice(None))
    check(serve["serving_default"](image=shown), slice(None))
    for i, encoded in enumerate(stored):
        pixels = tf.io.decode_image(encoded, dtype=shown.dtype)[None]
        is_varying_jpeg = dataset == "Sizes" and i % 2
        if not is_varying_jpeg and (pixels.shape[1:] != shown.shape[1:] or not size):
            check(serve["serving_default"](image=pixels), slice(i, i + 1))


def stored_images(data_dir, dataset):
    """The test split's images as they are encoded."""
    builder = getattr(builders, dataset)(data_dir=data_dir)
    skip = {"image": tfds.decode.SkipDecoding()}
    return [row["image"].numpy() for row in builder.as_dataset(split="test", decoders=skip)]


def test_export_again_from_the_checkpoint(exported, command):
    run = command.copy_of(exported["two_replicas"][0])
    before = (run.dir / "export/saved_model/saved_model.pb").stat().st_mtime_ns
    flags = words(RUNS["two_replicas"])
    exported_again = command(*flags, "--mode=export", "--num_devices=1", model_dir=run.dir)
    assert str(run.dir / "export") in exported_again.out
    assert (run.dir / "export/saved_model/saved_model.pb").stat().st_mtime_ns != before
    raw, logits = exported["two_replicas"][1:3]
    model = keras.saving.load_model(run.dir / "export/model.keras", compile=False)
    np.testing.assert_allclose(
        model(pipelines.to_model_input(tf.constant(raw))).numpy(), logits, atol=1e-5
    )


def test_a_task_without_an_export_says_so(command):
    run = command(*UNEXPORTED)
    assert "nothing exported" in run.err and not (run.dir / "export").exists()
    refused = command(*UNEXPORTED, "--mode=export", model_dir=run.dir, code=1)
    assert "no export of its own" in refused.error
