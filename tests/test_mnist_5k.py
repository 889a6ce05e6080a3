"""The embedded dataset: what it prepares, and that importing it does nothing else."""

import importlib
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from pipelines.datasets import mnist_5k

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def _prepare(builder_cls, data_dir):
    builder = builder_cls(data_dir=data_dir)
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
    )
    return builder


def _read(builder, split):
    """Returns the images, uint8 [n, 28, 28, 1], and labels, int64 [n], of a split as stored."""
    dataset = builder.as_dataset(split=split, batch_size=-1, as_supervised=True)
    return tuple(tfds.as_numpy(dataset))


def _rows(images):
    return {image.tobytes() for image in images}


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    return _prepare(mnist_5k.Mnist5k, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def source():
    with np.load(pathlib.Path(mnist_5k.__file__).with_name("mnist_5k.npz")) as arrays:
        return arrays["image"], arrays["label"]


def test_info(builder):
    assert builder.info.full_name == "mnist_5k/1.0.0"
    assert builder.info.supervised_keys == ("image", "label")
    assert builder.info.features["image"].shape == (28, 28, 1)
    assert builder.info.features["image"].np_dtype == np.uint8
    assert builder.info.features["label"].num_classes == 10
    assert "CC BY-SA 3.0" in builder.info.citation
    assert "LeCun" in builder.info.description


@pytest.mark.parametrize(("split", "num_per_class"), [("train", 400), ("test", 100)])
def test_splits_are_stratified(builder, split, num_per_class):
    assert builder.info.splits[split].num_examples == 10 * num_per_class
    images, labels = _read(builder, split)
    assert images.shape == (10 * num_per_class, 28, 28, 1)
    assert images.dtype == np.uint8
    np.testing.assert_array_equal(np.bincount(labels), [num_per_class] * 10)


def test_splits_partition_the_data_file(builder, source):
    source_images, source_labels = source
    label_of = {image.tobytes(): label for image, label in zip(*source, strict=True)}
    assert len(label_of) == len(source_images) == 5000  # No image occurs twice.
    train_images, train_labels = _read(builder, "train")
    test_images, test_labels = _read(builder, "test")
    assert _rows(train_images).isdisjoint(_rows(test_images))
    assert _rows(train_images) | _rows(test_images) == set(label_of)
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        np.testing.assert_array_equal([label_of[image.tobytes()] for image in images], labels)
    # The documented rule: the last 100 of each class, in file order, are the test split.
    expected = np.concatenate([np.flatnonzero(source_labels == c)[-100:] for c in range(10)])
    assert _rows(test_images) == _rows(source_images[expected])


def test_slices_hold_every_class(builder):
    # The data file is sorted by label; a held-out slice of the prepared split must not be.
    _, labels = _read(builder, "train[90%:]")
    assert np.bincount(labels, minlength=10).min() > 20


def test_preparing_again_gives_the_same_order(builder, tmp_path):
    again = _prepare(mnist_5k.Mnist5k, tmp_path)
    for split in ("train", "test"):
        for first, second in zip(_read(builder, split), _read(again, split), strict=True):
            np.testing.assert_array_equal(first, second)


def test_module_can_be_imported_again(tmp_path):
    reloaded = importlib.reload(mnist_5k)
    assert reloaded.Mnist5k(data_dir=tmp_path).info.full_name == "mnist_5k/1.0.0"


def _python(code, cwd, **env):
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | env
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_creates_no_files_and_reads_no_data(tmp_path):
    code = (
        "import sys, numpy\n"
        "def refuse(*args, **kwargs): raise AssertionError('data read at import')\n"
        "numpy.load = refuse\n"
        "import pipelines.datasets.mnist_5k\n"
        "assert 'tensorflow' not in sys.modules, 'TensorFlow loaded at import'\n"
    )
    _python(code, tmp_path, HOME=str(tmp_path), TFDS_DATA_DIR=str(tmp_path / "data"))
    assert list(tmp_path.iterdir()) == []


def test_devices_can_be_configured_after_preparing(tmp_path):
    code = (
        "import tensorflow as tf\n"
        "from pipelines.datasets.mnist_5k import Mnist5k\n"
        "Mnist5k(data_dir='data').download_and_prepare()\n"
        "cpu = tf.config.list_physical_devices('CPU')[0]\n"
        "two = [tf.config.LogicalDeviceConfiguration()] * 2\n"
        "tf.config.set_logical_device_configuration(cpu, two)\n"
        "print('devices', len(tf.config.list_logical_devices('CPU')))\n"
    )
    assert "devices 2" in _python(code, tmp_path)
