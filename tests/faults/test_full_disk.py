"""A disk that fills up or turns read-only: training goes on while it can, and nothing is lost."""

import errno
import os
import resource
import subprocess

import numpy as np
import pytest
from conftest import words

FLAGS = words(
    "--dataset=builders:Vectors --model=parts:linear --batch_size=4 --train_steps=40 --log_steps=5 "
    "--eval_steps=10 --checkpoint_steps=5 --max_to_keep=3 --steps_per_loop=1 --num_devices=1"
)
STEPS = list(range(5, 41, 5))


@pytest.fixture
def small_disk(tmp_path):
    """The folder of a disk of 400 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def undisturbed(module_command):
    return module_command(*FLAGS)


def warnings(run):
    return [line for line in run.err.splitlines() if line.startswith("warning: ")]


def steps_in(folder):
    return sorted(int(path.stem[5:]) for path in folder.glob("ckpt-*.json"))


def assert_one_error(run, *said):
    assert run.error.startswith("error: "), run.err
    assert "Traceback" not in run.err and run.err.count("error: ") == 1
    for word in said:
        assert word in run.error


def assert_same_weights(run, undisturbed):
    for name, value in undisturbed.weights().items():
        np.testing.assert_array_equal(run.weights()[name], value, err_msg=name)


def assert_same_end(run, undisturbed):
    assert_same_weights(run, undisturbed)
    assert run.column("step") == STEPS
    assert run.column("loss") == undisturbed.column("loss")
    assert run.column("step", "eval") == [10, 20, 30, 40]


def test_full_for_a_while(command, small_disk, undisturbed, monkeypatch):
    monkeypatch.setenv("FILL_AT", "12")
    monkeypatch.setenv("FREE_AT", "28")
    flags = [*FLAGS, "--callback=parts:fills_disk", "--tensorboard=true", "--log_steps=1"]
    run = command(*flags, model_dir=small_disk / "run")
    told = warnings(run)
    assert len([w for w in told if "checkpoints/ckpt-15 cannot be written" in w]) == 1
    assert len([w for w in told if "checkpoints/" in w]) == 1
    assert len([w for w in told if "metrics.jsonl cannot be written" in w]) == 1
    assert all("No space left on device" in w for w in told)
    assert "ckpt-30 is written again" in run.err
    assert_same_weights(run, undisturbed)
    assert run.column("step") == list(range(1, 41))
    assert run.column("step", "eval") == [10, 20, 30, 40]
    assert steps_in(run.dir / "checkpoints") == [30, 35, 40]


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_until_the_end(command, small_disk, undisturbed, monkeypatch, trouble):
    monkeypatch.setenv("FILL_AT", "12")
    monkeypatch.setenv("FREE_AT", "never")
    callback = "fills_disk" if trouble == "full" else "makes_read_only"
    run = command(*FLAGS, f"--callback=parts:{callback}", model_dir=small_disk / "run", code=1)
    why = "No space left on device" if trouble == "full" else "Read-only file system"
    assert_one_error(run, "ckpt-40, the last checkpoint, cannot be written", why)
    assert any("ckpt-15 cannot be written" in warning for warning in warnings(run))
    assert steps_in(run.dir / "checkpoints") == [5, 10]
    assert not (run.dir / "result.json").exists()

    refused = command(*FLAGS, model_dir=run.dir, code=1)  # as long as it lasts
    assert_one_error(refused, why, str(run.dir))

    if trouble == "full":
        (run.dir / "filling").unlink()
    else:
        subprocess.run(["umount", str(run.dir / "checkpoints")], check=True)
    resumed = command(*FLAGS, model_dir=run.dir)
    assert "resumed at step 10" in resumed.err and not warnings(resumed)
    assert_same_end(resumed, undisturbed)


def test_full_when_exporting(command, small_disk, monkeypatch):
    monkeypatch.setenv("FILL_AT", "end")
    monkeypatch.setenv("FREE_AT", "never")
    folder = small_disk / "run"
    flags = [*FLAGS, "--callback=parts:fills_disk", "--export=true"]
    run = command(*flags, model_dir=folder, code=1)
    assert_one_error(run, str(folder / "export"), "No space left on device")
    (folder / "filling").unlink()
    assert command(*FLAGS, "--export=true", model_dir=folder).result["steps"] == 40


@pytest.mark.parametrize(
    ("code", "name"),
    [
        *(("ENOSPC", name) for name in ("ckpt-10.json", "checkpoint", "metrics.jsonl")),
        *((code, "ckpt-10.json") for code in ("EDQUOT", "EROFS")),
    ],
)
def test_one_write_fails(command, undisturbed, monkeypatch, code, name):
    number, failures = getattr(errno, code), []
    replace = os.replace

    def fail_once(path):
        if os.path.basename(path) == name and not failures:
            failures.append(path)
            raise OSError(number, os.strerror(number), str(path))

    def failing_replace(source, target):
        fail_once(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing_replace)
    if name == "metrics.jsonl":
        write = os.fsync

        def failing_fsync(descriptor):
            fail_once(os.readlink(f"/proc/self/fd/{descriptor}"))
            write(descriptor)

        monkeypatch.setattr(os, "fsync", failing_fsync)
    run = command(*FLAGS)
    assert len(failures) == 1
    (warning,) = warnings(run)
    assert os.strerror(number) in warning and str(run.dir) in warning
    assert_same_end(run, undisturbed)


def test_files_limited_in_size(forks):
    """What a quota of the shell does to a run, from the first checkpoint on."""
    flags = [*FLAGS, "--model=mlp", "--hidden_units=4096"]
    run = forks.process(*flags, limits={resource.RLIMIT_FSIZE: 100_000}, code=1)
    assert_one_error(run, "File too large", "ckpt-40")
    assert not steps_in(run.dir / "checkpoints")
    assert len(warnings(run)) == 2, run.err  # for the last, and for the best
    resumed = forks.process(*flags, model_dir=run.dir)
    assert resumed.column("step") == STEPS
