"""Two processes at once: in one run's folder, and preparing one dataset."""

import errno
import fcntl
import os
import signal

import pytest
from conftest import finish, words
from forked import Fault

FLAGS = words(
    "--dataset=builders:Vectors --model=parts:linear --batch_size=4 --train_steps=8 --mode=train "
    "--log_steps=2 --checkpoint_steps=2 --num_devices=1"
)


def test_file_systems_without_locks(command, monkeypatch):
    for number in (errno.ENOLCK, errno.ENOTSUP):

        def no_locks(handle, kind, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", no_locks)
        folder = command.new_folder()
        run = command(*FLAGS, f"--data_dir={folder}-data", model_dir=folder)
        warnings = [line for line in run.err.splitlines() if line.startswith("warning: ")]
        assert len(warnings) == 2, run.err
        assert any(f"{folder}-data" in warning for warning in warnings)
        assert any("start no second run there" in warning for warning in warnings)
        assert run.result["steps"] == 8


@pytest.mark.parametrize(
    "dataset", ["builders:Perishable", pytest.param("mnist_5k", marks=pytest.mark.slow)]
)
def test_both_prepare_one_dataset_and_both_train(forks, tmp_path, dataset):
    flags = [*FLAGS, f"--dataset={dataset}"]
    pairs = [forks.start(*flags, data_dir=tmp_path / "data") for _ in range(2)]
    ours, theirs = (finish(*pair) for pair in pairs)
    assert ours.column("loss") == theirs.column("loss")
    assert len(ours.column("step")) == 4


def test_prepared_by_another_while_this_one_waits(forks, tmp_path):
    """The one that dies leaves nothing that the one waiting for its lock could take for whole."""
    flags = [*FLAGS, "--dataset=builders:Perishable"]
    env = {"DIE_AT": "example 30"}
    dying = forks.start(*flags, data_dir=tmp_path / "data", env=env)
    run = forks.process(*flags, data_dir=tmp_path / "data")
    finish(*dying, code=-signal.SIGKILL if dying[1].returncode != 0 else 0)
    assert len(run.column("step")) == 4


def test_folder_that_is_removed_in_the_middle(forks):
    """Not what a user wants, but no reason for a trace."""
    fault = Fault("os.rename", r"\.ckpt-4\.json\.tmp", errno=errno.ENOENT, times=1000)
    run = forks.process(*FLAGS, faults=[fault])
    assert run.result["steps"] == 8
    assert "ckpt-4 cannot be written (No such file or directory)" in run.err
