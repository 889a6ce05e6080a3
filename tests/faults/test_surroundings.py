"""Another machine than one's own: no network, no home, another locale; and what others may see."""

import functools
import os
import re
import signal
import stat
import subprocess
import sys
import time
import zipfile

import keras
import pytest
from conftest import ROOT, ForkedCommand, Run, environment, finish, words
from forked import Fault

FLAGS = words(
    "--dataset=builders:Vectors --model=parts:linear --batch_size=4 --train_steps=8 --num_devices=1"
)
# A script that ends while calls of Python that read ahead for it are under way.
READS_AHEAD = """
import sys
import pipelines
config = pipelines.DataConfig(
    dataset="builders:Vectors", data_dir=sys.argv[1], batch_size=4, augment=("parts:slow",)
)
train = pipelines.load_data(config, evaluating=False).train
held = {"chunks": train.chunks(), "taken": iter(train.batches().take(9))}[sys.argv[2]]
next(held)
"""
# What a run says: our own words, and nothing of the libraries below.
OWN_LINES = re.compile(
    r"(warning: )?\S+ is not prepared in .*: preparing it now|(train|test): reader .*"
    r"|jit_compile=auto: .*|model: \d+ parameters, .*|(train|eval ) step .*"
    r"|exported the raw weights to .*"
)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A run of an interpreter without home, network, terminal or a locale that exists."""
    folder = tmp_path_factory.mktemp("elsewhere")
    alone = ["unshare", "--net"] if not os.geteuid() else []
    if alone and subprocess.run([*alone, "true"], capture_output=True).returncode:
        alone = []
    env = environment(LC_ALL="xx_YY.broken", LANG="", HOME="/proc/nowhere")
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TERM", "USER", "TMPDIR", "XDG_CACHE_HOME"):
        env.pop(name, None)
    flags = ["--data_dir=data ü", "--model_dir=run ü", "--tensorboard=true", "--export=true"]
    process = subprocess.Popen(
        [*alone, sys.executable, "-m", "trainer.main", *FLAGS, *flags],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    return finish(Run(folder / "run ü"), process)


def test_no_home_no_network_no_locale(elsewhere):
    assert elsewhere.result["steps"] == 8
    assert "results in" in elsewhere.out


def test_logs_are_clean(elsewhere):
    others = [line for line in elsewhere.err.splitlines() if not OWN_LINES.fullmatch(line)]
    assert not others


def touching_network(**how):
    """Strikes at whatever reaches for another machine."""
    calls = ("connect", "getaddrinfo", "gethostbyname", "sendto")
    return [Fault(f"socket.{call}", times=10**6, **how) for call in calls]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, fork_server):
    """Makes a run that prepares its data, with an umask, no HOME, and no way to other machines."""

    def run(umask):
        folder = tmp_path_factory.mktemp("guarded")
        forks = ForkedCommand(folder, folder / "data")
        return forks.process(
            *FLAGS,
            *words("--tensorboard=true --export=true --checkpoint_steps=2"),
            "--callback=parts:tells_listening_ports",
            umask=umask,
            env={"HOME": None, "XDG_CACHE_HOME": None, "TF_CPP_MIN_LOG_LEVEL": "0"},
            faults=touching_network(signum=signal.SIGKILL),
        )

    return functools.cache(run)


def test_no_network_is_touched_and_no_port_opened(guarded):
    run = guarded(0o027)
    assert run.result["steps"] == 8
    assert "listening on 0 ports" in run.out


@pytest.mark.parametrize("dataset", ["fashion_mnist"])
def test_missing_data_without_network(forks, tmp_path, dataset):
    faults = touching_network(errno=101)
    folder = tmp_path / "none"
    started = time.monotonic()
    run = forks.process(f"--dataset={dataset}", data_dir=folder, faults=faults, code=1)
    assert time.monotonic() - started < 30  # 10 and what a busy machine adds
    assert run.error.startswith("error: ") and "Traceback" not in run.err
    assert f"not prepared in {folder}" in run.error and "cannot be reached" in run.error
    assert not run.dir.exists()


# Security.


@pytest.mark.parametrize("umask", [0o027, pytest.param(0o002, marks=pytest.mark.slow)])
def test_files_obey_the_umask(guarded, umask):
    run = guarded(umask)
    files = [path for path in run.dir.parent.rglob("*") if path.parent != run.dir.parent]
    assert len(files) > 20
    for path in files:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert not mode & umask, f"{path}: {mode:o}"
        if path.is_file() and path.suffix in (".json", ".jsonl", ".txt"):
            assert mode == 0o666 & ~umask, f"{path}: {mode:o}"


def test_models_of_others_run_no_code(command, tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: x)])
    model.save(tmp_path / "model.keras")
    run = command(*FLAGS, f"--init_from={tmp_path}/model.keras", code=1)
    assert run.error.startswith("error: --init_from") and "Traceback" not in run.err
    assert "ambda" in run.error


def test_archives_that_are_none(command, tmp_path):
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{")
    contents = [b"PK\x03\x04", path.read_bytes()]
    for content in contents:
        path.write_bytes(content)
        run = command(*FLAGS, f"--init_from={path}", code=1)
        assert run.error.startswith("error: --init_from") and "Traceback" not in run.err


def test_the_package_unpickles_nothing():
    for room in ("pipelines", "trainer"):
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text()
            assert not re.search(r"\bpickle\b|allow_pickle=True|safe_mode=False|\beval\(", text), (
                path
            )


@pytest.mark.parametrize("held", ["chunks", "taken"])
def test_a_program_ends_with_an_iterator_in_hand(data_dir, held):
    argv = [sys.executable, "-c", READS_AHEAD, str(data_dir), held]
    subprocess.run(argv, env=environment(), check=True, timeout=100)
