"""Whatever happens to the files of checkpoints: what is used is whole, what is not is told."""

import json
import logging
import shutil

import pytest
import tensorflow as tf
from conftest import words
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines import UserError
from trainer.checkpoint import CheckpointStore

FLAGS = words(
    "--dataset=builders:Vectors --model=parts:linear --batch_size=4 --train_steps=6 "
    "--checkpoint_steps=2 --mode=train --num_devices=1"
)
FUZZ = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def store(tmp_path):
    """Checkpoints of steps 1 and 2, whose only value is the step."""
    found = CheckpointStore(tmp_path / "checkpoints", 3)
    for step in (1, 2):
        variables = {"value": tf.Variable(float(step)), "rest": tf.Variable(tf.zeros([100]))}
        found.save(step, variables, {"model": "mlp"}, {"progress": {"rollbacks": 0}})
    return found


def restored(store):
    """(the newest whole checkpoint's manifest, the value in it)."""
    manifest = store.newest()
    value = tf.Variable(0.0)
    store.restore(manifest["step"], {"value": value}, exact=False)
    return manifest, float(value)


def assert_falls_back(store, changed):
    """The newest checkpoint is used if nothing has changed, else the one before."""
    manifest, value = restored(store)
    assert manifest["step"] == value == (1 if changed else 2)
    assert manifest["identity"] == {"model": "mlp"}
    assert manifest["state"] == {"progress": {"rollbacks": 0}}


def kinds_of_json():
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner)
    )


@FUZZ
@given(content=st.binary(max_size=300) | kinds_of_json().map(lambda x: json.dumps(x).encode()))
def test_any_manifest(store, content):
    path = store.folder / "ckpt-2.json"
    whole = path.read_bytes()
    path.write_bytes(content)
    assert_falls_back(store, content != whole)
    path.write_bytes(whole)


@FUZZ
@given(
    name=st.sampled_from(["ckpt-2.json", "ckpt-2.index", "ckpt-2.data-00000-of-00001"]),
    place=st.floats(0, 1, exclude_max=True),
    damage=st.sampled_from(["flip", "cut", "grow", "blank"]),
    value=st.integers(1, 255),
)
def test_any_damage(store, name, place, damage, value):
    path = store.folder / name
    whole = path.read_bytes()
    at = int(place * len(whole))
    path.write_bytes(
        {
            "flip": whole[:at] + bytes([whole[at] ^ value]) + whole[at + 1 :],
            "cut": whole[:at],
            "grow": whole + bytes([value]),
            "blank": whole[:at] + bytes(len(whole) - at),
        }[damage]
    )
    # White space that JSON does not mind, and zeros in place of zeros, are no damage.
    changed = path.read_bytes() != whole
    if name.endswith(".json") and changed:
        try:
            changed = json.loads(path.read_bytes()) != json.loads(whole)
        except ValueError:
            changed = True
    assert_falls_back(store, changed)
    path.write_bytes(whole)


@FUZZ
@given(gone=st.sets(st.sampled_from([".json", ".index", ".data-00000-of-00001"])))
def test_any_part_gone(store, gone, caplog):
    kept = shutil.copytree(store.folder, store.folder.with_name("kept"), dirs_exist_ok=True)
    for suffix in gone:
        (store.folder / f"ckpt-2{suffix}").unlink()
    caplog.clear()
    assert_falls_back(store, bool(gone))
    # Of a checkpoint without any of its files nothing is known.
    assert bool(caplog.records) == (0 < len(gone) < 3)
    shutil.copytree(kept, store.folder, dirs_exist_ok=True)


def test_nested_too_deeply_to_be_read(store):
    for text in ("[" * 100_000, '{"a":' * 100_000):
        (store.folder / "ckpt-2.json").write_text(text)
        assert_falls_back(store, True)


def test_files_named_by_a_manifest_are_not_opened_before_it_is_checked(store):
    path = store.folder / "ckpt-2.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = {"/dev/zero": {"bytes": 0, "sha256": ""}}  # would be read for ever
    path.write_text(json.dumps(manifest))
    assert_falls_back(store, True)


@pytest.mark.parametrize("suffix", [".json", ".index"])
def test_none_usable(store, suffix):
    for step in (1, 2):
        (store.folder / f"ckpt-{step}{suffix}").unlink()
    with pytest.raises(UserError, match="checkpoints"):
        store.newest()


@pytest.fixture(scope="module")
def trained(module_command):
    return module_command(*FLAGS)


@pytest.mark.parametrize("lost", [".json", ".data-*", ".*"])
def test_a_run_never_starts_over_silently(command, trained, lost):
    run = command.copy_of(trained)
    for path in (run.dir / "checkpoints").glob(f"ckpt-*{lost}"):
        path.unlink()
    before = sorted(path.name for path in run.dir.rglob("*"))
    failed = command(*FLAGS, model_dir=run.dir, code=1)
    assert failed.error.startswith("error: ") and str(run.dir) in failed.error
    assert "Traceback" not in failed.err
    assert sorted(path.name for path in run.dir.rglob("*")) == before


def test_what_a_killed_writer_left_goes(store, caplog):
    folder = store.folder
    (folder / "ckpt-3_temp").mkdir()
    (folder / "ckpt-3_temp/part-00000-of-00001.data").write_bytes(b"half")
    (folder / "ckpt-3.index").write_bytes(b"half")
    with caplog.at_level(logging.WARNING):
        assert restored(store)[1] == 2
    assert "ckpt-3 is damaged (it has no manifest" in caplog.text
    store.save(4, {"value": tf.Variable(4.0)}, {}, {})
    assert not (folder / "ckpt-3_temp").exists()
    assert restored(store)[1] == 4
