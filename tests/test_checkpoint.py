"""Checkpoints as others read them, which are kept, and where a run starts from."""

import json

import numpy as np
import pytest
import tensorflow as tf
from conftest import words

from trainer.checkpoint import CheckpointStore
from trainer.config import TrainConfig
from trainer.judge import Judge, Standing

RUN = words(
    "--dataset=builders:Vectors --model=parts:normed --batch_size=6 --learning_rate=0.05 "
    "--train_steps=12 --log_steps=12 --checkpoint_steps=2 --eval_steps=3 --num_devices=1"
)


def steps_in(folder):
    return sorted(int(path.stem[5:]) for path in folder.glob("ckpt-*.json"))


def test_tensorflow_reads_them(command):
    run = command(*RUN, "--mixed_precision_policy=mixed_float16")
    newest = tf.train.latest_checkpoint(str(run.dir / "checkpoints"))
    assert newest.endswith("ckpt-12")
    listed = [name for name, _ in tf.train.list_variables(newest)]
    names = {name.split("/")[1] for name in listed if name.startswith("variables/")}
    assert {"step", "train_sums"} <= names
    for prefix, count in {"models..model": 7, "optimizers..model": 12, "loss_scale": 3}.items():
        assert sum(name.startswith(prefix) for name in names) >= count, names
    assert run.variables()["step"] == 12
    manifest = json.loads((run.dir / "checkpoints/ckpt-12.json").read_text())
    assert manifest["step"] == 12 and len(manifest["files"]) == 2


def test_oldest_go_and_the_best_stays(command):
    # The rate grows until the model is thrown off: the best is not among the last.
    flags = words("--optimizer=sgd --lr_schedule=parts:rising --learning_rate=0.3 --max_to_keep=2")
    run = command(*RUN, *flags, "--best_metric=loss", "--train_steps=24")
    assert steps_in(run.dir / "checkpoints") == [22, 24]
    best = min(run.rows("eval"), key=lambda row: row["loss"])
    assert best["step"] < 22
    assert run.result["best"]["step"] == best["step"]
    assert steps_in(run.dir / "best") == [best["step"]]
    # It holds the weights that were evaluated there.
    start = (f"--init_from={run.dir}/best/ckpt-{best['step']}", "--freeze=norm")
    again = command(*RUN, *start, "--learning_rate=0", "--train_steps=1")
    for key in ("loss", "accuracy"):
        assert again.rows("eval")[-1][key] == pytest.approx(best[key], rel=1e-5)


@pytest.mark.parametrize(
    ("metric", "best"), [("f1_score", 0.9), ("loss", 0.1), ("word_error_rate", 0.1), ("score", 0.1)]
)
def test_which_is_the_best(metric, best):
    """Higher is better, but for losses and errors, and for what a task says."""
    judge, standing = Judge(TrainConfig(best_metric=metric), "loss", ("score",)), Standing()
    for step, value in enumerate((0.5, 0.1, 0.9, 0.5)):
        judge.judge({"step": step, metric: value}, standing)
    assert standing.best[metric] == best


def test_a_later_damaged_one_takes_no_place(tmp_path):
    store = CheckpointStore(tmp_path, max_to_keep=1)
    variables = {"step": tf.Variable(0)}
    store.save(12, variables, identity={}, state={})
    (tmp_path / "ckpt-12.index").write_bytes(b"damaged")
    store.save(11, variables, identity={}, state={})
    assert store.newest()["step"] == 11
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("ckpt-11")


def test_the_best_of_what_is_kept_outlives_a_better_one_that_is_not(tmp_path):
    store = CheckpointStore(tmp_path, max_to_keep=1)
    variables = {"step": tf.Variable(0)}
    for step in (2, 4):
        store.save(step, variables, identity={}, state={})
    assert store.steps() == [4]
    store.settle(4)  # a checkpoint of the run was written, in which 4 is the best
    store.save(6, variables, identity={}, state={})
    assert store.steps() == [4, 6]
    store.forget_after(5)  # the run goes on from there in another order
    assert store.steps() == [4]
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("ckpt-4")
    store.save(8, variables, identity={}, state={})
    store.settle(8)
    assert store.steps() == [8]


def test_files_of_others_are_left_alone(command):
    folder = command.new_folder()
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("notes.txt", "ckpt-best.index", "model-3.index", "ckpt-3.index.bak"):
        (folder / "checkpoints" / name).write_text("mine")
    command(*RUN, "--max_to_keep=1", model_dir=folder)
    assert steps_in(folder / "checkpoints") == [12]
    for name in ("notes.txt", "ckpt-best.index", "model-3.index", "ckpt-3.index.bak"):
        assert (folder / "checkpoints" / name).read_text() == "mine"


@pytest.mark.parametrize("source", ["checkpoints/ckpt-12", "export/model.keras"])
def test_starting_from_old_weights(command, source):
    old = command(*RUN, "--export=true")
    flags = ("--learning_rate=0", "--optimizer=sgd", "--batch_size=4", "--train_steps=1")
    new = command(*RUN, *flags, f"--init_from={old.dir / source}", "--num_devices=2")
    assert "resumed" not in new.err
    assert new.result["steps"] == 1
    for name, value in old.weights().items():
        if "moving" not in name:
            np.testing.assert_array_equal(new.weights()[name], value, err_msg=name)


def test_weights_of_another_model_are_refused(command):
    old = command(*RUN, "--export=true")
    for source in ("checkpoints/ckpt-12", "export/model.keras"):
        flags = ("--model=parts:linear", f"--init_from={old.dir / source}")
        assert "--init_from" in command(*RUN, *flags, code=1).error


@pytest.mark.parametrize("secs", [0, 0.0001])
def test_time_between_checkpoints(command, secs):
    run = command(*RUN, f"--checkpoint_secs={secs}", "--max_to_keep=50", "--steps_per_loop=1")
    assert len(steps_in(run.dir / "checkpoints")) >= 11


def test_same_seed_same_weights_in_every_process(command):
    first, second = command(*RUN), command.process(*RUN)
    for name, value in first.variables().items():
        np.testing.assert_array_equal(second.variables()[name], value, err_msg=name)
    other = command(*RUN, "--seed=1").weights()
    assert any((other[name] != value).any() for name, value in first.weights().items())
