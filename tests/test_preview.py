"""python -m pipelines.preview: the words, the rows, and the sheet of what a model sees."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import words

from pipelines import DataConfig, cli, inspection, load_data, preview, to_model_input


@pytest.fixture
def run(data_dir, tmp_path, monkeypatch, capfd):
    """Runs the command in an empty folder; returns (exit code, stdout, last line of stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*flags):
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.run(preview.main, ["preview", f"--data_dir={data_dir}", *flags])
        out, err = capfd.readouterr()
        return stop.value.code, out, err.strip().splitlines()[-1] if err.strip() else ""

    return run


def data_of(data_dir, dataset, **fields):
    return load_data(DataConfig(dataset=dataset, data_dir=str(data_dir), **fields), mixing=True)


def is_picture(path):
    pixels = tf.io.decode_png(path.read_bytes()).numpy()
    return min(pixels.shape[:2]) > 200 and pixels.std() > 10


def test_a_sheet_of_images(run, tmp_path):
    code, out, _ = run(*words("--dataset=builders:Images --batch_size=8 --augment=flip,crop"))
    assert code == 0
    assert "input 'image': uint8 [8, 8, 1], reaches the model as float32 in [0, 1]" in out
    assert "label 'label': one of 3 classes" in out
    assert "split train: 90 examples, 11 steps of 8 an epoch, 2 left out" in out
    assert "split test: 33 examples, 5 steps of 8 an epoch" in out
    assert "reader memory" in out and "memory free: " in out
    assert ["0", "30", "11"] in [line.split() for line in out.splitlines()]
    assert "sheet of 8 of 8 examples: preview.png" in out
    assert is_picture(tmp_path / "preview.png")


@pytest.mark.parametrize(
    "flags",
    [
        "--dataset=builders:Colours16 --augment=mixup,cutmix --batch_size=6",
        "--dataset=builders:AnySize --image_size=16 --batch_size=4 --reader=stream",
        "--dataset=builders:Images --show=eval --step=4 --batch_size=8 --num_examples=3",
    ],
)
def test_sheets_of_other_images(run, tmp_path, flags):
    code, out, error = run(*words(flags), "--output=sheet.png")
    assert code == 0, error
    assert is_picture(tmp_path / "sheet.png") and "sheet.png" in out


def test_rows_of_what_is_no_image(run, tmp_path):
    code, out, _ = run(*words("--dataset=builders:Line --batch_size=4 --num_examples=3"))
    assert code == 0
    assert "label 'y': a number or several to predict" in out
    *_, header, first, second, third = out.splitlines()
    assert header.split()[:2] == ["index", "y"]
    assert len({line.split()[0] for line in (first, second, third)}) == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--output=sheet.jpg"], "--output=sheet.jpg: the name of a picture must end in .png"),
        (["--output=no/such/sheet.png"], "--output=no/such/sheet.png: cannot write there"),
        (["--step=-1"], "--step"),
        (["--show=test"], "--show"),
        (["--augment=zoom"], "unknown augmentation"),
        (["more"], "unexpected argument"),
    ],
)
def test_mistakes(run, flags, told):
    code, _, error = run("--dataset=builders:Images", "--batch_size=8", *flags)
    assert code == 1
    assert error.startswith("error: ") and told in error


def test_without_matplotlib(run, monkeypatch):
    monkeypatch.setattr("pipelines.plots.available", lambda: False)
    flags = words("--dataset=builders:Images --batch_size=8")
    code, out, error = run(*flags)
    assert code == 1 and "pip install 'pipeline-trainer[plots]'" in error
    assert "90 examples" in out  # what can be told is
    assert run(*flags, "--output=")[0] == 0


def test_the_sheet_shows_what_the_model_receives(data_dir):
    train = data_of(data_dir, "builders:Images", batch_size=8, augment=("crop",)).train
    shown = inspection.model_view(train, step=13, num_rows=5, mix_fn=None)
    batch = next(iter(train.batches(first_step=13)))
    np.testing.assert_array_equal(shown.inputs, to_model_input(batch["image"])[:5])
    np.testing.assert_array_equal(shown.labels, batch["label"][:5])
    assert shown.inputs.dtype == np.float32 and shown.num_outside == 0


def test_mixed_examples_have_mixed_labels(data_dir):
    data = data_of(data_dir, "builders:Images", batch_size=8, augment=("mixup",))
    shown = inspection.model_view(data.train, 3, 8, data.mix_fn)
    np.testing.assert_allclose(shown.labels.sum(1), 1, rtol=1e-6)
    assert inspection.label_text(data.spec, np.float32([0, 0.25, 0.75])) == "0.75 2\n0.25 1"
    assert inspection.label_text(data.spec, np.float32([0, 1, 0])) == "1"


@pytest.mark.parametrize("dataset", ["builders:Images", "builders:Line", "builders:AnySize"])
def test_labels_are_the_same_from_memory_and_from_files(data_dir, dataset):
    found = [
        inspection.labels_of(data_of(data_dir, dataset, batch_size=4, reader=reader).train)
        for reader in ("memory", "indexed")
    ]
    np.testing.assert_array_equal(*found)
    assert len(found[0]) > 4
