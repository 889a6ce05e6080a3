"""The readers: what they yield is the same, however records are held and read."""

import dataclasses
import io
import logging
import os
import pathlib
import sys

import builders
import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

import pipelines
import pipelines.order
from pipelines import INDEX, WEIGHT, UserError, index, memory, readers, records, resources, source

F = tfds.features
READERS = ("memory", "indexed", "stream")
TRAIN, TEST = 101, 64


def picture(i):
    return np.random.default_rng(i).integers(0, 256, (6, 5, 3), np.uint8)


Small = builders.builder(
    "small",
    {
        "image": F.Image(shape=(6, 5, 3), encoding_format="png"),
        "label": F.ClassLabel(num_classes=7),
        "id": F.Scalar(dtype=np.int64),
        "box": F.BBoxFeature(),
        "packed": F.Tensor(shape=(2, 2), dtype=np.float32, encoding="zlib"),
        "flag": F.Scalar(dtype=np.bool_),
    },
    lambda i: {
        "image": picture(i),
        "label": i % 7,
        "id": i,
        "box": F.BBox(0.1, 0.2, 0.3, 0.4),
        "packed": np.full((2, 2), i, np.float32),
        "flag": i % 2 == 1,
    },
    {"train": TRAIN, "test": TEST},
    keys=("image", "label"),
)


def photo(i):
    """A JPEG, or every fifth time a PNG, whose size is its own."""
    rng = np.random.default_rng(i)
    height, width = rng.integers(20, 150, 2)
    y, x = np.mgrid[:height, :width] / 20
    waves = [np.sin(y * a + x * b + c) for a, b, c in rng.uniform(0, 3, (3, 3))]
    pixels = np.uint8(np.stack(waves, 2) * 100 + 128)
    encode = tf.io.encode_png if i % 5 == 0 else tf.io.encode_jpeg
    return io.BytesIO(encode(pixels).numpy())


Photos = builders.builder(
    "photos",
    {
        "image": F.Image(shape=(None, None, 3), encoding_format="jpeg"),
        "label": F.ClassLabel(num_classes=4),
        "id": F.Scalar(dtype=np.int64),
    },
    lambda i: {"image": photo(i), "label": i % 4, "id": i},
    {"train": 30, "test": 7},
    keys=("image", "label"),
)
BadPhotos = builders.builder(
    "bad_photos",
    dict(Photos(data_dir="/nowhere").info.features),
    lambda i: {
        "image": io.BytesIO(b"no image") if i == 4 else photo(i),
        "label": i % 4,
        "id": i,
    },
    {"train": 12, "test": 4},
    keys=("image", "label"),
)
BadLabels = builders.builder(
    "bad_labels",
    {"x": F.Tensor(shape=(2,), dtype=np.float32), "y": F.ClassLabel(num_classes=3)},
    lambda i: {"x": [i, i], "y": -1 if i in (3, 17) else i % 3},
    {"train": 20, "test": 4},
)
Counted = builders.builder(
    "counted",
    {"x": F.Tensor(shape=(1,), dtype=np.float32), "y": F.Scalar(dtype=np.int64)},
    lambda i: {"x": [i], "y": i % 5},
    {"train": 40, "test": 1003},
)


@pytest.fixture(scope="module")
def prepare(tmp_path_factory):
    """Prepares a builder once for each form; returns the folder, as --dataset takes it."""
    done = {}

    def prepare(cls, num_shards=1, file_format="tfrecord"):
        key = cls.name, num_shards, file_format
        if key not in done:
            builder = cls(data_dir=tmp_path_factory.mktemp("data"), file_format=file_format)
            config = tfds.download.DownloadConfig(num_shards=num_shards)
            builder.download_and_prepare(download_config=config)
            done[key] = str(builder.data_dir)
        return done[key]

    return prepare


def load(dataset, **fields):
    config = pipelines.DataConfig(**{"dataset": dataset, "batch_size": 8, **fields})
    return pipelines.load_data(config)


def some(pipeline, count, first=0):
    return list(pipeline.batches(first).take(count).as_numpy_iterator())


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
@pytest.mark.parametrize("num_shards", [1, 5, 64])
def test_readers_yield_the_stored_examples_in_one_order(prepare, file_format, num_shards):
    folder = prepare(Small, num_shards, file_format)
    batches = {r: some(load(folder, reader=r).train, 26) for r in READERS}
    assert_equal(batches["memory"], batches["indexed"])
    for epoch in (batches["memory"][:12], batches["stream"][12:24]):
        ids = np.concatenate([batch["id"] for batch in epoch])
        assert len(set(ids)) == 96
    for batch in batches["memory"][:2] + batches["stream"][:2]:
        np.testing.assert_array_equal(batch["id"], batch[INDEX])  # records lie in order of their id
        np.testing.assert_array_equal(batch["image"], [picture(i) for i in batch["id"]])
        np.testing.assert_array_equal(batch["label"], batch["id"] % 7)
        np.testing.assert_array_equal(batch["packed"][:, 1, 1], batch["id"])
        np.testing.assert_array_equal(batch["flag"], batch["id"] % 2 == 1)
        np.testing.assert_allclose(batch["box"], [[0.1, 0.2, 0.3, 0.4]] * 8, rtol=1e-6)
        assert (batch[WEIGHT] == 1).all()


@pytest.mark.parametrize("reader", READERS)
def test_restarts_and_threads_change_nothing(prepare, reader):
    fields = {"reader": reader, "shuffle_window": 20 if reader == "stream" else None}
    fields["augment"] = ("flip",)
    folder = prepare(Small, 5)
    expected = some(load(folder, **fields).train, 30)
    for calls, ahead in ((1, 1), (5, 7)):
        pipeline = load(folder, num_parallel_calls=calls, prefetch_batches=ahead, **fields).train
        for first in (11, 12):
            assert_equal(some(pipeline, 30 - first, first), expected[first:])
        step = 5
        for chunk, count in pipeline.chunks(step, max_steps=4):
            rows = [{key: t.numpy()[i] for key, t in chunk.items()} for i in range(count)]
            assert_equal(rows, expected[step : step + count])
            step += count
            if step >= 26:
                break


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("batch_size", [1, 8, 100, 101, 300])
def test_evaluation_counts_each_example_once(prepare, reader, batch_size):
    data = load(prepare(Counted, 3), reader=reader, eval_batch_size=batch_size)
    counts = np.zeros(1003)
    for chunk, count in data.evaluation.chunks(num_epochs=1):
        np.add.at(counts, chunk[INDEX][:count], chunk[WEIGHT][:count])
    assert (counts == 1).all()


@pytest.mark.parametrize("reader", READERS)
def test_a_short_last_batch_is_filled_up_with_its_own(prepare, reader):
    pipeline = load(prepare(Small, 2), reader=reader, drop_remainder=False).train
    last = some(pipeline, 1, 12)[0]
    assert last[WEIGHT].tolist() == [1] * 5 + [0] * 3
    assert set(last["id"][5:]) <= set(last["id"][:5])


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "split", ["train[10%:90%]", "train[:50]+test[:10]", "test[-3:]+train[40:47]", "train[33:35]"]
)
def test_slices_and_sums_of_splits(prepare, reader, split):
    folder = prepare(Small, 5)
    expected = tfds.builder_from_directory(folder).as_dataset(split=split)
    expected = [example["id"] for example in expected.as_numpy_iterator()]
    fields = {"reader": reader, "train_split": split, "batch_size": 2, "eval_split": "test"}
    train = load(folder, **fields).train
    assert train.num_examples == len(expected)
    seen = {}
    for batch in train.batches(num_epochs=1).as_numpy_iterator():
        seen.update(zip(batch[INDEX].tolist(), batch["id"].tolist(), strict=True))
    assert len(seen) == len(expected) // 2 * 2
    assert all(expected[position] == number for position, number in seen.items())


def test_held_out_examples_stay_out_of_training(prepare):
    folder = prepare(builders.TrainOnly, 3)
    for reader in READERS:
        data = load(folder, reader=reader, batch_size=6)
        train = np.concatenate([batch["x"] for batch in some(data.train, 3)])
        held = np.concatenate([b["x"] for b in some(data.evaluation, 1)])[:2]
        assert len(np.unique(train, axis=0)) == 18
        assert not (train[:, None] == held[None]).all(2).any()


def room_for(monkeypatch, num_bytes):
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: num_bytes / 0.6)


@pytest.mark.parametrize("augment", [(), ("center",)])
def test_photos_look_the_same_from_every_reader(prepare, monkeypatch, augment):
    fields = {"image_size": 24, "augment": augment}
    folder = prepare(Photos, 3)
    decoded = some(load(folder, reader="memory", **fields).train, 5)
    assert_equal(some(load(folder, reader="indexed", **fields).train, 5), decoded)
    room_for(monkeypatch, 200_000)  # enough as they are encoded
    data = load(folder, reader="memory", **fields)
    assert isinstance(data.train.reader, memory.EncodedReader)
    assert_equal(some(data.train, 5), decoded)
    images = np.concatenate([batch["image"] for batch in decoded])
    assert images.shape == (40, 24, 24, 3) and images.dtype == np.uint8


def test_random_crops_differ_between_epochs_and_center_does_not(prepare):
    for augment, differ in (((), True), (("center",), False)):
        train = load(prepare(Photos), image_size=16, augment=augment).train
        by_id = [{}, {}]
        for step, batch in enumerate(some(train, 6)):
            by_id[step // 3].update(zip(batch["id"].tolist(), batch["image"], strict=True))
        both = by_id[0].keys() & by_id[1].keys()
        same = [np.array_equal(by_id[0][i], by_id[1][i]) for i in both]
        assert np.mean(same) < 0.2 if differ else np.all(same)


def test_the_default_size_of_photos_is_logged(prepare, caplog):
    with caplog.at_level(logging.INFO):
        data = load(prepare(Photos))
    assert data.spec.input_shape == (224, 224, 3)
    assert "224 pixels" in caplog.text


def test_images_of_one_size_can_be_resized(prepare):
    folder = prepare(Small)
    whole = load(folder, image_size=12)
    assert whole.spec.input_shape == whole.train.element_spec()["image"].shape[2:] == (12, 12, 3)
    batch = some(whole.train, 1)[0]
    expected = tf.image.resize(picture(batch["id"][0]), (12, 12)) + 0.5
    np.testing.assert_array_equal(batch["image"][0], tf.cast(expected, tf.uint8))
    for reader in ("memory", "indexed"):
        crops = load(folder, image_size=12, augment=("rrc",), reader=reader)
        assert some(crops.train, 1)[0]["image"].shape == (8, 12, 12, 3)
        assert some(crops.evaluation, 1)[0]["image"].shape == (8, 12, 12, 3)


# Bad records.


def shards_of(folder, split="train"):
    return sorted(pathlib.Path(folder).glob(f"*-{split}.*"))


@pytest.fixture
def damaged(prepare, tmp_path):
    """Copies a prepared dataset and damages the copy with `damage(bytes) -> bytes` of one shard."""

    def copy(cls, damage, num_shards=3, shard=1, file_format="tfrecord"):
        folder = pathlib.Path(prepare(cls, num_shards, file_format))
        # The folder's last two names are those of dataset and version.
        target = tmp_path / folder.parent.name / folder.name
        target.mkdir(parents=True)
        for path in folder.iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        path = shards_of(target)[shard]
        path.write_bytes(damage(path.read_bytes()))
        return str(target)

    return copy


def start_of_record(data, number):
    at = 0
    for _ in range(number):
        at += int.from_bytes(data[at : at + 8], "little") + 16
    return at


def flip_a_byte_of_record(number):
    def damage(data):
        at = start_of_record(data, number) + 40
        return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]

    return damage


def refusal(make):
    with pytest.raises(UserError) as caught:
        make()
    return str(caught.value)


def visit(pipeline, epochs=1):
    for _ in pipeline.batches(num_epochs=epochs):
        pass


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_record_stops_the_run_and_is_named(damaged, reader):
    folder = damaged(Small, flip_a_byte_of_record(5))
    message = refusal(lambda: visit(load(folder, reader=reader, drop_remainder=False).train))
    assert "train.tfrecord-00001-of-00003, record 5: its checksum" in message
    assert "\n" not in message
    if reader != "memory":
        train = load(folder, reader=reader, drop_remainder=False).train
        assert "record 5" in refusal(lambda: list(train.chunks(num_epochs=1)))


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_record_is_skipped_without_shifting_others(prepare, damaged, reader, caplog):
    folder = damaged(Small, flip_a_byte_of_record(5))
    fields = {"reader": reader, "drop_remainder": False}
    whole = load(prepare(Small, 3), **fields).train
    train = load(folder, on_bad_record="skip", **fields).train
    bad = sum(s.count for s in source.stretches(*train_split(folder))[:1]) + 5
    epochs = 2
    for ours, theirs in zip(some(train, 26), some(whole, 26), strict=True):
        good = (ours[INDEX] != bad) & (theirs[WEIGHT] > 0)
        np.testing.assert_array_equal(ours[WEIGHT], np.float32(good))
        np.testing.assert_array_equal(ours[INDEX], theirs[INDEX])
        for key in ("id", "image"):
            np.testing.assert_array_equal(ours[key][good], theirs[key][good])
        assert set(ours["id"]) <= set(ours["id"][good])  # stand-ins are copies
    assert train.skipped_records == 1
    lines = [r.getMessage() for r in caplog.records if "skipping" in r.getMessage()]
    assert len(lines) == 1 and "record 5" in lines[0], epochs


def train_split(folder):
    builder = tfds.builder_from_directory(folder)
    return builder, source.Split("train", 0, builder.info.splits["train"].num_examples)


@pytest.mark.parametrize("reader", READERS)
def test_a_torn_file(damaged, reader, caplog):
    folder = damaged(Small, lambda data: data[: len(data) * 2 // 3])
    message = refusal(lambda: load(folder, reader=reader))
    assert "00001-of-00003" in message and "records can be read" in message
    data = load(folder, reader=reader, on_bad_record="skip", drop_remainder=False)
    weights = sum(batch[WEIGHT].sum() for batch in some(data.train, 13))
    missing = data.train.skipped_records
    assert 5 < missing < 20 and weights == TRAIN - missing
    assert f"skipping {missing} records" in caplog.text


@pytest.mark.parametrize("reader", ["memory", "indexed"])
def test_a_damaged_array_record(damaged, reader):
    def damage(data):
        return data[:3000] + bytes(byte ^ 0xFF for byte in data[3000:3004]) + data[3004:]

    folder = damaged(Small, damage, file_format="array_record")
    fields = {"reader": reader, "drop_remainder": False}
    assert "00001-of-00003" in refusal(lambda: visit(load(folder, **fields).train))
    data = load(folder, on_bad_record="skip", **fields)
    weights = sum(batch[WEIGHT].sum() for batch in some(data.train, 13))
    assert 1 <= data.train.skipped_records < 40
    assert weights == TRAIN - data.train.skipped_records


@pytest.mark.parametrize("kind", ["decoded", "encoded", "indexed", "stream"])
def test_what_is_no_image_is_skipped_or_stops_the_run(prepare, kind, monkeypatch, caplog):
    folder = prepare(BadPhotos, 2)
    if kind == "encoded":
        room_for(monkeypatch, 100_000)
    fields = {"image_size": 16, "drop_remainder": False, "batch_size": 4}
    fields["reader"] = kind if kind in READERS else "memory"
    message = refusal(lambda: visit(load(folder, **fields).train))
    assert "bad_photos-train.tfrecord-00000-of-00002, record 4: it cannot be decoded" in message
    train = load(folder, on_bad_record="skip", **fields).train
    seen = [batch["id"][batch[WEIGHT] > 0] for batch in some(train, 3)]
    assert sorted(np.concatenate(seen)) == [i for i in range(12) if i != 4]
    assert train.skipped_records == 1
    assert caplog.text.count("record 4") == 1


@pytest.mark.parametrize("reader", READERS)
def test_impossible_labels(prepare, reader):
    folder = prepare(BadLabels)
    message = refusal(lambda: visit(load(folder, reader=reader).train))
    assert "its label 'y' is -1, outside 0..2" in message
    train = load(folder, reader=reader, on_bad_record="skip", batch_size=20).train
    visit(train)
    assert train.skipped_records == 2


def test_labels_that_are_plain_integers_are_counted(prepare):
    for reader in READERS:
        assert load(prepare(Counted, 2), reader=reader).spec.num_classes == 5


def fill_record(number, byte):
    """Replaces the payload of a record, with the checksum that becomes it."""

    def damage(data):
        at = start_of_record(data, number)
        payload = byte * int.from_bytes(data[at : at + 8], "little")
        crc = google_crc32c.value(payload)
        crc = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        end = at + 12 + len(payload)
        return data[: at + 12] + payload + crc.to_bytes(4, "little") + data[end + 4 :]

    return damage


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("byte", [b"x", b"\xff"])
def test_records_that_are_no_examples_are_not_counted_as_labels(damaged, reader, byte, caplog):
    folder = damaged(Counted, fill_record(3, byte))
    fields = {"reader": reader, "drop_remainder": False}
    message = refusal(lambda: visit(load(folder, **fields).train))
    assert "train.tfrecord-00001-of-00003, record 3: it cannot be decoded" in message
    data = load(folder, on_bad_record="skip", **fields)
    visit(data.train)
    assert data.spec.num_classes == 5 and data.train.skipped_records == 1
    assert caplog.text.count("record 3: it cannot be decoded") == 1


def test_a_users_error_inside_the_pipeline_is_one_line(prepare):
    def broken(example, seed):
        def fail(x):
            raise ValueError(f"cannot handle {x.shape}")

        return {**example, "image": tf.numpy_function(fail, [example["image"]], tf.uint8)}

    train = load(prepare(Small), augment=(broken,)).train
    assert "ValueError: cannot handle (6, 5, 3)" in refusal(lambda: next(iter(train.batches())))
    assert "ValueError: cannot handle (6, 5, 3)" in refusal(lambda: next(train.chunks()))


# Choice.


def test_auto_chooses_by_size_and_place_and_logs_the_numbers(prepare, monkeypatch, caplog):
    folder = prepare(Small)
    for room, local, expected in (
        (10**9, True, "memory"),
        (1000, True, "indexed"),
        (1000, False, "stream"),
    ):
        room_for(monkeypatch, room)
        monkeypatch.setattr(resources, "is_local", lambda path, local=local: local)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert load(folder).train.reader.name == expected
        line = next(r.getMessage() for r in caplog.records if "train: reader" in r.getMessage())
        for part in (expected, "prepared", "decoded", "free", "local" if local else "remote"):
            assert part in line
    assert "--reader=memory" in refusal(lambda: load(folder, reader="memory"))


def test_photos_are_held_decoded_encoded_or_not_at_all(prepare, monkeypatch):
    folder = prepare(Photos)
    found = []
    for room in (10**8, 200_000, 1000):
        room_for(monkeypatch, room)
        found.append(type(load(folder).train.reader).__name__)
    assert found == ["PixelReader", "EncodedReader", "DiskReader"]


def test_windows_fit_the_data(prepare):
    folder = prepare(Small, 5)
    order = load(folder, reader="stream", shuffle_window=50).train.order
    assert (order.window, order.block) == (50, 1)
    assert load(folder, reader="stream").train.order.window == TRAIN
    assert load(folder, reader="stream", shuffle=False).train.order.window is None


def test_what_cannot_be_honoured_is_refused(prepare, monkeypatch):
    folder = prepare(Small)
    for fields, part in (
        ({"shuffle_window": 5}, "--shuffle_window"),
        ({"shuffle_window": 5, "reader": "stream", "shuffle": False}, "--shuffle_window"),
        ({"use_synthetic_data": True, "reader": "indexed"}, "--reader=indexed"),
        ({"augment": ("center",)}, "center"),
        ({"augment": ("mixup",)}, "mixup"),
    ):
        assert part in refusal(lambda fields=fields: load(folder, **fields))
    assert "--image_size" in refusal(lambda: load(prepare(Counted), image_size=8))
    both = {"augment": ("rrc", "center")}
    assert "exclude" in refusal(lambda: load(prepare(Photos), **both))
    folder = prepare(Small, 5, "array_record")
    monkeypatch.setitem(sys.modules, "array_record.python", None)
    assert "pip install array_record" in refusal(lambda: load(folder))


# Naming a dataset.


@pytest.mark.parametrize(
    ("named", "full_name", "width"),
    [
        ("", "configured/two/2.0.0", 2),
        ("/five", "configured/five/2.0.0", 5),
        (":2.0.0", "configured/two/2.0.0", 2),
        ("/five:2.0.0", "configured/five/2.0.0", 5),
    ],
)
def test_config_and_version_may_follow_a_builder_class(named, full_name, width, tmp_path):
    data = load(f"builders:Configured{named}", data_dir=str(tmp_path))
    assert f"{data.name}/{data.version}" == full_name
    assert data.spec.input_shape == (width,)


def test_unknown_configs_and_versions_of_a_builder_class_are_refused(tmp_path):
    for named, part in (("/six", "six"), (":9.9.9", "9.9.9"), ("/five:9.9.9", "9.9.9")):
        dataset = f"builders:Configured{named}"
        said = refusal(lambda dataset=dataset: load(dataset, data_dir=str(tmp_path)))
        assert f"--dataset={dataset}" in said and part in said


def test_a_folder_of_versions_says_where_the_datasets_are(tmp_path):
    load("builders:Configured/five", data_dir=str(tmp_path))
    prepared = tmp_path / "configured" / "five" / "2.0.0"
    for folder in (prepared.parent, prepared.parent.parent):
        assert str(prepared) in refusal(lambda folder=folder: load(str(folder)))


# The rest.


def test_synthetic_data_has_the_same_types_and_possible_labels(prepare):
    for cls in (Small, Photos):
        real, synthetic = (load(prepare(cls), use_synthetic_data=s) for s in (False, True))
        assert real.train.element_spec() == synthetic.train.element_spec()
        assert real.spec == synthetic.spec
        first, again = some(synthetic.train, 2), some(synthetic.train, 2)
        assert_equal(first, again)
        for batch in first:
            assert batch["label"].min() >= 0
            assert batch["label"].max() < real.spec.num_classes
            assert batch["image"].max() > 200
        np.testing.assert_array_equal(first[0][INDEX], some(real.train, 1)[0][INDEX])


@pytest.mark.parametrize("reader", ["memory", "stream"])
def test_stages_are_prefixes_of_what_is_trained_on(prepare, reader):
    train = load(prepare(Small, 2), reader=reader, augment=("flip",)).train
    decoding = [] if reader == "memory" else ["decode"]
    stages = ["order", "read", *decoding, "augment", "batch", "prefetch"]
    assert list(train.stage_names) == stages
    chunk, num_steps = next(train.chunks(3))
    for stage in stages:
        element, its_steps = next(train.chunks(3, stage=stage))
        positions = element["positions"] if "positions" in element else element[INDEX]
        np.testing.assert_array_equal(tf.reshape(positions, [-1]), tf.reshape(chunk[INDEX], [-1]))
        assert its_steps == num_steps
    for key in chunk:
        np.testing.assert_array_equal(chunk[key], element[key])


def test_offsets_are_kept_until_a_file_changes(prepare, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(index, "_MIN_SECS_TO_CACHE", 0)
    paths = [str(path) for path in shards_of(prepare(Small, 5))]
    walked = []
    walk = index.walk
    monkeypatch.setattr(index, "walk", lambda path: walked.append(path) or walk(path))
    first = index.record_offsets(paths)
    assert [len(offsets) - 1 for offsets in first] == [20, 20, 21, 20, 20]
    assert len(walked) == 5
    for a, b in zip(first, index.record_offsets(paths), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(walked) == 5
    os.utime(paths[0], (1, 1))
    index.record_offsets(paths)
    assert len(walked) == 10
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # then in memory only
    index.record_offsets(paths)


def test_neighbours_are_read_together(prepare, monkeypatch):
    builder, split = train_split(prepare(Small, 3))
    found = records.Records(builder, split, False)
    reads = []
    read = index.File.read
    monkeypatch.setattr(index.File, "read", lambda *a: reads.append(a[1]) or read(*a))
    positions = np.array([50, 10, 11, 12, 51, 11, 100])
    first = found.read(positions)
    assert len(reads) == 3
    assert list(first) == [found.read(positions[i : i + 1])[0] for i in range(7)]


def test_stream_resumes_by_reading_no_more_than_a_window(prepare, monkeypatch):
    train = load(prepare(Small, 3), reader="stream", shuffle_window=30, num_parallel_calls=1).train
    asked = []
    read = records.Records.read
    monkeypatch.setattr(records.Records, "read", lambda *a: asked.append(a[1]) or read(*a))
    some(train, 1, 11)
    assert len(asked[0]) <= 30


@pytest.mark.parametrize("reader", ["indexed", "stream"])
def test_memory_does_not_grow_over_epochs(prepare, reader):
    train = load(prepare(Photos, 3), reader=reader, image_size=64).train
    sizes = []
    for step, _ in enumerate(train.batches().take(3 * 40)):
        if step % 30 == 29:
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            sizes.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
    assert sizes[-1] < sizes[1] + 30, sizes


def test_windowed_order_bounds_its_blocks():
    @dataclasses.dataclass
    class Known:
        mean_bytes: float

    order = pipelines.order.Order(10**6, 128)
    chosen = readers.windowed(order, Known(75_000), None)
    assert chosen.window == (128 << 20) // 75_000 and chosen.block == 13
    assert readers.windowed(order, Known(10**7), None).window == 1024
    assert readers.windowed(order, Known(100), 640).block == 10
