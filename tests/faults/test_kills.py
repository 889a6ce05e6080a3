"""A run killed anywhere and started again ends as if nothing had happened."""

import os
import random
import signal
import time

import numpy as np
import pytest
from conftest import finish, words
from forked import Fault

# Dropout, slots and a schedule make a resume hard; checkpoints are many and the calls short.
FLAGS = words(
    "--dataset=builders:Perishable --model=parts:dense_dropout --learning_rate=0.01 "
    "--lr_schedule=cosine --warmup_steps=6 --batch_size=6 --train_steps=40 --log_steps=4 "
    "--eval_steps=10 --eval_batch_size=11 --checkpoint_steps=4 --max_to_keep=2 --steps_per_loop=2 "
    "--metrics=parts:dies_evaluating --callback=parts:dies --tensorboard=true --export=true "
    "--num_devices=1"
)
TIMINGS = ("seconds", "examples_per_sec", "input_wait")


def before(event, path, nth=1):
    """A kill before a call to the operating system."""
    return {"faults": [Fault(event, path, nth, signum=signal.SIGKILL)]}


def at(place):
    """A kill by user code."""
    return {"env": {"DIE_AT": place}}


# In the order in which one run meets them.
PLACES = {
    "preparing the dataset": at("example 17"),
    "after the first trace": at("begin"),
    "before the first manifest": before("open", r"\.ckpt-4\.json\.tmp"),
    "between manifest and list": before("os.rename", r"/\.checkpoint\.tmp", 2),
    "evaluating": at("evaluation"),
    "deleting an old manifest": before("os.remove", r"/ckpt-\d+\.json", 5),
    "before a later manifest": before("open", r"\.ckpt-2\d\.json\.tmp"),
    "taking rows back": before("os.rename", r"\.metrics\.jsonl\.tmp"),
    "taking events back": before("os.rename", r"tfevents.*\.tmp"),
    "exporting": before("open", r"/model\.keras"),
    "before the result": before("os.rename", r"\.result\.json\.tmp"),
}


def assert_same_end(run, reference):
    """Bit-equal variables, the same rows but for their timings, and a result."""
    ours, theirs = run.variables(), reference.variables()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    for split in ("train", "eval"):
        assert untimed(run.rows(split)) == untimed(reference.rows(split))
    assert run.result["finished"] and run.result["eval"]["loss"] == reference.result["eval"]["loss"]
    assert (run.dir / "export/saved_model/saved_model.pb").exists()


def untimed(rows):
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


def run_into(forks, run, data_dir, options):
    """Runs until a kill strikes; returns what the process said."""
    killed, process = forks.start(*FLAGS, model_dir=run, data_dir=data_dir, **options)
    finish(killed, process, code=-signal.SIGKILL)
    assert not (killed.dir / "result.json").exists()
    return killed


def test_kills_at_every_kind_of_place(forks, tmp_path):
    reference = forks.start(*FLAGS, data_dir=tmp_path / "other")
    folder, data_dir = forks.new_folder(), tmp_path / "data"
    for place, options in PLACES.items():
        killed = run_into(forks, folder, data_dir, options)
        assert "Traceback" not in killed.err, place
    run = forks.process(*FLAGS, model_dir=folder, data_dir=data_dir)
    assert "resumed at step 40" in run.err
    assert_same_end(run, finish(*reference))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_kills_at_random_moments(forks, tmp_path, seed):
    """25 kills: at random calls to the operating system, and at random times."""
    started = time.monotonic()
    reference = finish(*forks.start(*FLAGS, data_dir=tmp_path / "other"))
    secs, rng, kills = time.monotonic() - started, random.Random(seed), 0
    folder, data_dir = forks.new_folder(), tmp_path / "data0"
    while kills < 25:
        event = rng.choice(["open", "os.rename", "os.remove", "os.mkdir", "time"])
        options = {} if event == "time" else before(event, str(tmp_path), rng.randint(1, 40))
        run, process = forks.start(*FLAGS, model_dir=folder, data_dir=data_dir, **options)
        if event == "time":
            time.sleep(rng.uniform(0, 0.9 * secs))
            process.kill()
        finished = process.communicate(300) and process.returncode == 0
        assert finished or process.returncode == -signal.SIGKILL, process.communicate()[1]
        if finished:
            assert_same_end(run, reference)
            folder, data_dir = forks.new_folder(), tmp_path / f"data{kills}"
        kills += not finished
    assert_same_end(forks.process(*FLAGS, model_dir=folder, data_dir=data_dir), reference)


def test_the_next_run_lists_the_last_checkpoint(forks):
    flags = [*FLAGS, "--train_steps=8", "--export=false"]
    kill = before("os.rename", r"/checkpoints/\.checkpoint\.tmp", 2)
    killed, process = forks.start(*flags, **kill)
    finish(killed, process, code=-signal.SIGKILL)
    assert killed.variables()["step"] == 4
    resumed = forks.process(*flags, model_dir=killed.dir)
    assert "resumed at step 8" in resumed.err
    assert resumed.variables()["step"] == 8


STARTING = {
    "opening the folder": Fault("open", r"/\.lock", signum=signal.SIGTERM),
    "writing the flags": Fault("os.rename", r"\.flags\.txt\.tmp", signum=signal.SIGTERM),
}


@pytest.mark.parametrize("place", STARTING)
def test_sigterm_while_starting(forks, place):
    run = forks.process(*FLAGS, faults=[STARTING[place]], code=143)
    assert "Traceback" not in run.err
    assert not (run.dir / "result.json").exists() and not run.rows("train")
    assert os.listdir(run.dir)


def test_sigterm_while_saving(forks, command):
    """The checkpoint that was being written is the one that stays."""
    fault = Fault("open", r"\.ckpt-8\.json\.tmp", signum=signal.SIGTERM)
    run = forks.process(*FLAGS, faults=[fault], code=143)
    assert "stopped by a signal at step 8" in run.error
    resumed = command(*FLAGS, model_dir=run.dir)
    assert "resumed at step 8" in resumed.err
    assert resumed.column("step") == list(range(4, 41, 4))


def test_ctrl_c_twice_ends_at_once(forks, command):
    flags = [*FLAGS, "--steps_per_loop=1", "--export=false"]
    run = forks.process(*flags, "--callback=parts:interrupt_twice_at_step_7", code=130)
    assert "AssertionError" not in run.err
    resumed = command(*flags, model_dir=run.dir)
    assert "resumed at step 4" in resumed.err
    assert resumed.column("step") == list(range(4, 41, 4))
