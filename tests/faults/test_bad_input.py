"""Data that is not what it should be: one line, or a record left out and counted."""

import io
import json
import os
import pathlib
import re
import struct
import zlib

import builders
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from conftest import words

import pipelines
from pipelines import UserError, images
from pipelines.assembly import WEIGHT

F = tfds.features
TRAIN = words("--model=parts:linear --batch_size=4 --train_steps=2 --mode=train --num_devices=1")


def png(height, width, pixels=b""):
    """A PNG whose header claims a size, whatever its pixels are."""

    def chunk(kind, data):
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body


def jpeg(height, width):
    """A JPEG of 8 by 8 pixels whose header claims another size."""
    data = tf.io.encode_jpeg(np.zeros((8, 8, 1), np.uint8)).numpy()
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def gif(height, width):
    """The beginning of a GIF."""
    frame = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\x00;"
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\x00\x00" + bytes(6) + frame


def bmp(height, width):
    """The headers of a BMP."""
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info + bytes(64)


BAD_IMAGES = {
    "empty": b"",
    "text": b"no image",
    "cut off": png(8, 8, bytes(72))[:30],
    "only a magic number": b"\xff\xd8\xff",
    "png bomb": png(60_000, 60_000),
    "flat png bomb": png(1, 2**31 - 1),
    "jpeg bomb": jpeg(60_000, 60_000),
    "gif bomb": gif(60_000, 60_000),
    "bmp bomb": bmp(60_000, 60_000),
    "bmp bomb upside down": bmp(-60_000, 60_000),
}


def good(i):
    return png(8, 8, (b"\0" + bytes([i] * 8)) * 8)


def pictures(shape):
    """A dataset of 24 + 3 images, every other of which is bad until there are no more."""
    bad = list(BAD_IMAGES.values())

    def row(i, split):
        is_bad = split == "train" and i % 2 and i // 2 < len(bad)
        return {"image": io.BytesIO(bad[i // 2] if is_bad else good(i)), "label": i % 3}

    image = F.Image(shape=shape, encoding_format="png")
    features = {"image": image, "label": F.ClassLabel(num_classes=3)}
    return builders.builder("pictures", features, row, {"train": 24, "test": 3}, ("image", "label"))


def prepare(cls, folder):
    builder = cls(data_dir=folder)
    builder.download_and_prepare()
    return str(builder.data_dir)


def load(folder, **fields):
    return pipelines.load_data(pipelines.DataConfig(dataset=folder, batch_size=4, **fields))


def refusal(folder, **fields):
    """The one line that visiting the training split ends with."""
    with pytest.raises(UserError) as caught:
        for _ in load(folder, **{"drop_remainder": False, **fields}).train.batches(num_epochs=1):
            pass
    return str(caught.value)


def weight(pipeline):
    return sum(batch[WEIGHT].sum() for batch in pipeline.batches(num_epochs=1).as_numpy_iterator())


@pytest.mark.parametrize("reader", ["memory", pytest.param("indexed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(8, 8, 1), (None, None, 1)], ids=["one size", "any size"])
def test_what_is_no_image_or_a_bomb(tmp_path, shape, reader, caplog):
    folder = prepare(pictures(shape), tmp_path)
    fields = {"image_size": 8 if shape[0] is None else None, "drop_remainder": False}
    fields["reader"] = reader
    assert re.search(r"record \d+: it cannot be decoded", refusal(folder, **fields))
    data = load(folder, on_bad_record="skip", **fields)
    assert weight(data.train) == 24 - len(BAD_IMAGES)
    assert data.train.skipped_records == len(BAD_IMAGES)
    for number, kind in enumerate(BAD_IMAGES):
        assert caplog.text.count(f"record {2 * number + 1}: it cannot be decoded") == 1, kind


def test_bombs_are_refused_from_their_headers():
    """Before memory for their pixels is taken, and nothing else is."""
    for kind, bad in BAD_IMAGES.items():
        if "bomb" in kind and "jpeg" not in kind:
            with pytest.raises(tf.errors.InvalidArgumentError, match="too many pixels"):
                images.refuse_huge(tf.constant([bad, good(0)]))
    huge = images.shapes_of(tf.constant([good(0), BAD_IMAGES["jpeg bomb"]]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="too many pixels"):
        images.within_limit(huge, huge)
    for whole in (good(0), jpeg(8, 8), gif(8, 8), bmp(-8, 8), png(8192, 8192), b"x" * 30):
        images.refuse_huge(tf.constant([whole, good(1)]))


ODD = {3: np.nan, 7: np.inf}
NumbersWithNan = builders.builder(
    "numbers_with_nan",
    {"x": F.Tensor(shape=(2, 2), dtype=np.float32), "y": F.ClassLabel(num_classes=2)},
    lambda i: {"x": np.full((2, 2), ODD.get(i, i), np.float32), "y": i % 2},
    {"train": 12, "test": 3},
)
TargetsWithNan = builders.builder(
    "targets_with_nan",
    {"x": F.Tensor(shape=(2,), dtype=np.float32), "y": F.Tensor(shape=(2,), dtype=np.float32)},
    lambda i: {"x": [i, i], "y": [0.0, ODD.get(i, i)]},
    {"train": 12, "test": 3},
)


@pytest.mark.parametrize("reader", ["memory", pytest.param("indexed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cls", [NumbersWithNan, TargetsWithNan])
def test_numbers_that_are_not_finite(tmp_path, reader, cls):
    folder = prepare(cls, tmp_path)
    message = refusal(folder, reader=reader)
    assert "record 3" in message or "record 7" in message
    assert "not finite" in message
    data = load(folder, on_bad_record="skip", reader=reader, drop_remainder=False)
    assert weight(data.train) == 10 and data.train.skipped_records == 2


def numbers(name, bad):
    """24 examples of two classes of which those of numbers `bad` hold NaN, and 4 to evaluate on."""

    def row(i, split):
        x = np.full(2, np.nan if i in bad.get(split, ()) else i / 24, np.float32)
        return {"x": x, "y": i % 2}

    features = {"x": F.Tensor(shape=(2,), dtype=np.float32), "y": F.ClassLabel(num_classes=2)}
    return builders.builder(name, features, row, {"train": 24, "test": 4})


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_batch_of_nothing_but_bad_records_teaches_nothing(command, tmp_path, replicas):
    flags = words(
        "--model=parts:linear --optimizer=sgd --batch_size=2 --shuffle=false --log_steps=1"
    )
    flags += [*words("--train_epochs=1 --mode=train"), f"--num_devices={replicas}"]
    folder = prepare(numbers("with_bad_pair", {"train": (4, 5)}), tmp_path)
    run = command(*flags, f"--dataset={folder}", "--on_bad_record=skip")
    split = "--train_split=train[:4]+train[6:]"
    without = command(*flags, f"--dataset={folder}", split)
    empty = run.rows("train").pop(2)
    assert empty["examples"] == 0 and empty["loss"] is None
    for name, value in run.weights().items():
        np.testing.assert_array_equal(value, without.weights()[name], err_msg=name)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("reader", ["memory", pytest.param("indexed", marks=pytest.mark.slow)])
def test_a_split_of_nothing_but_bad_records(command, tmp_path, split, reader):
    folder = prepare(numbers("all_bad", {split: range(24)}), tmp_path)
    flags = words("--model=parts:linear --batch_size=3 --train_epochs=1 --on_bad_record=skip")
    run = command(*flags, f"--dataset={folder}", f"--reader={reader}", code=1)
    count = 24 if split == "train" else 4
    assert f"none of the split's {count} records can be used" in run.error
    assert f"all_bad-{split}.tfrecord" in run.error


def change_metadata(folder, **changes):
    path = pathlib.Path(folder) / "dataset_info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def splits_of(length):
    names = {"train": length, "test": "11"}
    template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    return [
        {"name": name, "shardLengths": [n], "numBytes": "1", "filepathTemplate": template}
        for name, n in names.items()
    ]


@pytest.mark.parametrize("reader", ["memory", pytest.param("stream", marks=pytest.mark.slow)])
def test_metadata_that_lies(tmp_path, reader, caplog):
    folder = prepare(builders.Vectors, tmp_path)
    change_metadata(folder, splits=splits_of("50"))  # of 31
    assert "31 records can be read where" in refusal(folder, reader=reader)
    data = load(folder, reader=reader, on_bad_record="skip", drop_remainder=False)
    assert weight(data.train) == 31 and data.train.skipped_records == 19
    change_metadata(folder, splits=splits_of("20"))
    assert "holds 31 records where the dataset's metadata promises 20" in refusal(folder)
    data = load(folder, reader=reader, on_bad_record="skip", drop_remainder=False)
    assert weight(data.train) == 20 and "the others are left out" in caplog.text
    for length in ("0", "-5"):
        change_metadata(folder, splits=splits_of(length))
        assert f"train ({length} examples)" in refusal(folder, reader=reader)


METADATA = {
    "empty": b"",
    "cut off": b"{",
    "a list": b"[]",
    "unknown field": b'{"a": 1}',
    "no text": bytes(range(256)),
    "deep": b"[" * 100_000,
    "lengths of another type": json.dumps({"splits": [{"shardLengths": ["x"]}]}).encode(),
}


@pytest.mark.parametrize("named", ["by class", "by folder"])
def test_garbled_metadata(tmp_path, named):
    folder = pathlib.Path(prepare(builders.Vectors, tmp_path))
    dataset = builders.Vectors if named == "by class" else str(folder)
    for file in ("dataset_info.json", "features.json"):
        whole = (folder / file).read_bytes()
        for kind, content in METADATA.items():
            (folder / file).write_bytes(content)
            try:
                load(dataset, data_dir=str(tmp_path), use_synthetic_data=True)
            except UserError as error:
                assert str(tmp_path) in str(error), (file, kind)
            else:  # a class knows its features, whatever the file says
                assert (named, file) == ("by class", "features.json"), kind
        (folder / file).write_bytes(whole)


def test_another_version_than_is_prepared(command, data_dir, tmp_path):
    folder = pathlib.Path(prepare(builders.Vectors, tmp_path))
    change_metadata(folder, version="2.0.0")
    run = command(*TRAIN, "--dataset=builders:Vectors", f"--data_dir={tmp_path}", code=1)
    assert "1.0.0" in run.error and "2.0.0" in run.error and str(tmp_path) in run.error
    os.rename(folder, folder.with_name("2.0.0"))  # then the wanted one is prepared beside it
    assert command(*TRAIN, "--dataset=builders:Vectors", f"--data_dir={tmp_path}").code == 0


def test_files_that_may_not_be_read(tmp_path, monkeypatch):
    folder = prepare(builders.Vectors, tmp_path)
    open_file = os.open

    def refusing(path, *args, **kwargs):
        if "train.tfrecord" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    message = refusal(folder)
    assert "vectors-train.tfrecord" in message and "Permission denied" in message


# Paths.


def test_unusual_paths(command, tmp_path):
    folder = tmp_path / "with spaces and 'quotes'" / "näme ⊕ {c}" / ("x" * 255)
    flags = [*TRAIN, "--dataset=builders:Vectors", "--tensorboard=true", "--checkpoint_steps=1"]
    flags += [f"--data_dir={folder}/data"]
    first = command(*flags, model_dir=folder / "run")
    run = command(f"--flagfile={first.dir}/flags.txt", "--train_steps=4", model_dir=first.dir)
    assert "resumed at step 2" in run.err and run.result["steps"] == 4
    assert len(list((run.dir / "checkpoints").glob("*.json"))) == 3


def test_a_folder_whose_checkpoints_tensorflow_would_not_find(command, tmp_path):
    for name in ("a*", "a?", "[a]", "a\\\\b"):
        run = command(*TRAIN, model_dir=tmp_path / name, code=1)
        assert run.error.startswith("error: --model_dir") and "pattern" in run.error
        assert not run.dir.exists()


@pytest.mark.parametrize("flag", ["model_dir", "data_dir", "init_from", "dataset", "flagfile"])
@pytest.mark.parametrize("name", ["x" * 256, "/" + "y/" * 3000, os.fsdecode(b"/tmp/\xff\xfe")])
def test_impossible_paths(command, tmp_path, flag, name):
    flags = [*TRAIN, "--dataset=builders:Vectors", f"--{flag}={tmp_path}/{name}"]
    run = command(*flags, code=1)
    assert run.error.startswith("error: ") and "Traceback" not in run.err, run.err
