"""Law 3: resume is exact and cheap, whatever stopped the run."""

import random
import shutil
import signal
import time

import numpy as np
import pytest
from conftest import Run, finish, words
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

# All that makes a resume hard: dropout, batch norm, augmentation, slots, a schedule with warm-up.
HARD = words(
    "--dataset=builders:Images --model=parts:conv --augment=flip,crop --optimizer=adam "
    "--lr_schedule=cosine --warmup_steps=6 --learning_rate=0.01 --batch_size=12 --log_steps=3 "
    "--eval_steps=10 --checkpoint_steps=4 --max_to_keep=2 --tensorboard=true"
)
KILLED = [*HARD, "--train_steps=400", "--callback=parts:dawdle", "--jit_compile=auto"]
KILLS = 20
TIMINGS = ("seconds", "examples_per_sec", "input_wait")


def assert_same_end(run, reference):
    """Bit-equal variables, and the same rows but for their timings."""
    assert_same_weights(run, reference)
    for split in ("train", "eval"):
        assert untimed(run.rows(split)) == untimed(reference.rows(split))
    assert events_by_tag(run) == events_by_tag(reference)


def assert_same_weights(run, reference):
    ours, theirs = run.variables(), reference.variables()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def untimed(rows):
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


def events_by_tag(run):
    """tag -> steps, read back by TensorBoard; each step must be there once and in order."""
    steps = {}
    files = sorted((run.dir / "tensorboard").glob("*tfevents*"))
    for path in files:
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                steps.setdefault(value.tag, []).append(event.step)
    for tag, found in steps.items():
        assert found == sorted(set(found)), f"{tag} at steps {found}"
    assert steps["train/loss"] == run.column("step")
    assert steps.get("eval/loss", []) == run.column("step", "eval")
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_sigkill_at_random_moments(command, devices):
    flags = [*KILLED, f"--logical_devices={devices}"]
    undisturbed = command.start(*flags)
    run, rng = Run(command.new_folder()), random.Random(devices)
    for number in range(KILLS):
        kill(*command.start(*flags, model_dir=run.dir), rng, in_startup=number == 1)
        assert not (run.dir / "result.json").exists(), "it was over before it was killed"
    run = command.process(*flags, model_dir=run.dir)
    assert "resumed at step" in run.err
    assert_same_end(run, finish(*undisturbed))


def kill(run, process, rng, in_startup):
    """Waits for a new checkpoint, or not, and then a random while, and kills the process."""
    before = newest_checkpoint(run)
    while not in_startup and process.poll() is None and newest_checkpoint(run) == before:
        time.sleep(0.05)
    time.sleep(rng.uniform(0, 1.5))
    process.kill()
    process.communicate()


def newest_checkpoint(run):
    """Its step, 0 if there is none."""
    return max((int(p.stem[5:]) for p in run.dir.glob("checkpoints/ckpt-*.json")), default=0)


STOPPED = ("--callback=parts:terminate_at_step_7", "--steps_per_loop=1")


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_stop_in_the_middle_of_an_epoch(command, replicas):
    flags = [*HARD, "--train_steps=15", f"--num_devices={replicas}"]
    reference = command(*flags)
    run = command(*flags, *STOPPED, code=143)
    assert not (run.dir / "result.json").exists()
    assert run.column("step") == [3, 6]
    resumed = command(*flags, model_dir=run.dir)
    assert "resumed at step 7" in resumed.err
    assert_same_end(resumed, reference)
    assert resumed.result["steps"] == 15


def test_resume_with_another_number_of_replicas(command):
    flags = words(
        "--dataset=builders:Vectors --model=parts:normed --batch_size=6 --log_steps=1 "
        "--lr_schedule=cosine --warmup_steps=3 --mode=train --train_steps=10"
    )
    reference = command(*flags, "--num_devices=1")
    for before, after in ((1, 3), (3, 1)):
        stopped = command(*flags, *STOPPED, f"--num_devices={before}", code=143)
        run = command(*flags, f"--num_devices={after}", model_dir=stopped.dir)
        assert run.column("step") == list(range(1, 11))
        assert run.column("loss") == pytest.approx(reference.column("loss"), rel=1e-5)
        rates = reference.column("learning_rate")
        assert run.column("learning_rate") == pytest.approx(rates, rel=1e-7)
        for name, value in reference.weights().items():
            np.testing.assert_allclose(run.weights()[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_random_numbers_of_any_origin_go_on(command, replicas):
    flags = [*HARD, "--model=parts:noisy", "--train_steps=10", f"--num_devices={replicas}"]
    reference = command(*flags)
    stopped = command(*flags, *STOPPED, code=143)
    assert_same_end(command(*flags, model_dir=stopped.dir), reference)


def test_a_finished_run_trains_no_step_more(command):
    flags = [*HARD, "--train_steps=8", "--num_devices=2"]
    first = command(*flags)
    before, rows = checkpoint_files(first), first.rows("train") + first.rows("eval")
    result = first.result
    again = command(*flags, model_dir=first.dir)
    assert checkpoint_files(again) == before
    assert again.rows("train") + again.rows("eval") == rows
    for key in ("steps", "epochs", "eval", "best", "train_secs", "examples_per_sec"):
        assert again.result[key] == result[key], key


def checkpoint_files(run):
    return {p.name: p.read_bytes() for p in (run.dir / "checkpoints").iterdir()}


def test_totals_are_totals(command):
    flags = [*HARD, "--lr_schedule=constant", "--num_devices=1"]
    first = command(*flags, "--train_steps=8")
    more = command(*flags, "--train_steps=15", model_dir=first.dir)
    assert "resumed at step 8" in more.err
    assert more.result["steps"] == 15
    whole = command(*flags, "--train_steps=15").weights()
    for name, value in more.weights().items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)


@pytest.mark.parametrize(
    ("signum", "code"),
    [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGINT, 130)],
)
def test_signals_end_a_process_with_their_codes(command, signum, code):
    flags = [*HARD, "--train_steps=100000", "--callback=parts:dawdle"]
    run, process = command.start(*flags)
    while process.poll() is None and not newest_checkpoint(run):
        time.sleep(0.05)
    process.send_signal(signum)
    finish(run, process, code=code)
    assert "Traceback" not in run.err
    newest = newest_checkpoint(run)
    assert newest >= run.column("step")[-1] > 0
    assert f"step {newest}" in run.error


def test_signal_during_evaluation(command, monkeypatch):
    flags = [*HARD, "--train_steps=10", "--eval_steps=100", "--num_devices=1"]
    flags += ["--metrics=parts:terminates", "--jit_compile=false", "--eval_batch_size=11"]
    run = command(*flags, code=143)
    assert run.column("step") == [3, 6, 9, 10]
    assert run.rows("eval") == []
    monkeypatch.setenv("NO_TERMINATION", "1")
    resumed = command(*flags, model_dir=run.dir)
    assert "resumed at step 10" in resumed.err
    assert resumed.column("step") == [3, 6, 9, 10]
    assert resumed.column("step", "eval") == [10]
    # Then it is at rest.
    before = {path: path.stat().st_mtime_ns for path in run.dir.rglob("*.jsonl")}
    before |= {path: path.stat().st_mtime_ns for path in (run.dir / "checkpoints").iterdir()}
    command(*flags, model_dir=run.dir)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_an_evaluation_is_written_once_whenever_the_run_is_stopped(command, monkeypatch):
    """Stopped in the evaluation at 4, gone on, killed before the next checkpoint, gone on."""
    flags = [
        *HARD,
        *words("--train_steps=10 --eval_steps=4 --checkpoint_steps=100 --num_devices=1"),
    ]
    flags += words("--metrics=parts:terminates --jit_compile=false --eval_batch_size=11")
    run = command(*flags, "--tensorboard=true", code=143)
    stopped = command.copy_of(run)
    monkeypatch.setenv("NO_TERMINATION", "1")
    command(*flags, "--tensorboard=true", model_dir=run.dir)
    # As a kill right after the evaluation would have left it.
    shutil.rmtree(run.dir / "checkpoints")
    shutil.copytree(stopped.dir / "checkpoints", run.dir / "checkpoints")
    command(*flags, "--tensorboard=true", model_dir=run.dir)
    assert run.column("step", "eval") == [4, 8, 10]
    assert events_by_tag(run)["eval/loss"] == [4, 8, 10]


def damage_truncated(path):
    path.write_bytes(path.read_bytes()[:-7])


def damage_bit_flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def damage_deleted(path):
    path.unlink()


DAMAGES = [
    (".data-*", damage_bit_flipped),
    (".index", damage_deleted),
    (".json", damage_truncated),
]


def test_damaged_newest_checkpoint_falls_back(command):
    flags = [*HARD, "--train_steps=8", "--num_devices=1"]
    whole = command(*flags)
    for files, damage in DAMAGES:
        run = command.copy_of(whole)
        (path,) = (run.dir / "checkpoints").glob(f"ckpt-8{files}")
        damage(path)
        resumed = command(*flags, model_dir=run.dir)
        assert "resumed at step 4" in resumed.err, (files, damage)
        warnings = [w for w in resumed.err.splitlines() if w.startswith("warning: ")]
        assert any("ckpt-8" in warning for warning in warnings)
        assert_same_weights(resumed, whole)

    run = command.copy_of(whole)
    for path in (run.dir / "checkpoints").glob("ckpt-*.data-*"):
        damage_truncated(path)
    before = checkpoint_files(run)
    failed = command(*flags, model_dir=run.dir, code=1)
    assert failed.error.startswith("error: ")
    assert "2 checkpoints" in failed.error and str(run.dir) in failed.error
    assert checkpoint_files(run) == before
