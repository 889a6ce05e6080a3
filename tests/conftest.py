"""Shared by all tests: three logical CPU devices, small datasets, and runs of the command.

The devices are set once, before anything touches them; a test chooses how many with --num_devices.
GPUs are hidden: what is tested here must hold without them.
"""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import dataclasses
import json
import multiprocessing.forkserver
import pathlib
import re
import shutil
import subprocess
import sys

import forked
import keras
import numpy as np
import parts
import pytest
import tensorflow as tf

from pipelines import cli
from trainer import main as main_lib

ROOT = pathlib.Path(__file__).resolve().parent.parent
NUM_DEVICES = 3
JSON_TYPES = {
    "str": str,
    "int": int,
    "float": (int, float),
    "dict": dict,
    "list": list,
    "null": type(None),
}

tf.config.threading.set_intra_op_parallelism_threads(1)  # as a run with several devices does
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES,
)


@dataclasses.dataclass
class Run:
    """A run's folder, and what came of the command."""

    dir: pathlib.Path
    code: int = 0
    out: str = ""
    err: str = ""

    @property
    def result(self):
        return json.loads((self.dir / "result.json").read_text())

    def rows(self, split):
        path = self.dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row for row in map(json.loads, lines) if row["split"] == split]

    def column(self, name, split="train"):
        return [row[name] for row in self.rows(split)]

    def variables(self, folder="checkpoints"):
        """Every variable of the newest checkpoint, by its name there."""
        reader = tf.train.load_checkpoint(str(self.dir / folder))
        names = [n for n in reader.get_variable_to_shape_map() if n.startswith("variables/")]
        return {name.split("/")[1]: reader.get_tensor(name) for name in names}

    def weights(self, folder="checkpoints"):
        """The model's variables of the newest checkpoint."""
        found = self.variables(folder).items()
        return {name: value for name, value in found if name.startswith("models.")}

    @property
    def error(self):
        """The last line on stderr."""
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""


class Command:
    """Runs trainer.main on small data: in this process by calling it, or as a process."""

    # What most tests do not need and every run would pay for.
    lean = ("--export=false", "--tensorboard=false", "--progress=false", "--jit_compile=false")

    def __init__(self, folder, data_dir, capture=None):
        self._folder, self._data_dir, self._capture = folder, data_dir, capture
        self._count = 0

    def __call__(self, *flags, model_dir=None, code=0):
        """Runs in this process and expects a code (None: any); later flags replace earlier ones."""
        run = Run(pathlib.Path(model_dir or self.new_folder()))
        if self._capture:
            self._capture.readouterr()
        try:
            cli.run(main_lib.main, ["trainer", *self.flags(run.dir), *flags])
        except SystemExit as stop:
            run.code = stop.code
        if self._capture:
            run.out, run.err = self._capture.readouterr()
        assert code in (run.code, None), run.err
        return run

    def start(self, *flags, model_dir=None, env=None):
        """Starts a process; returns (Run, Popen)."""
        run = Run(pathlib.Path(model_dir or self.new_folder()))
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.main", *self.flags(run.dir), *flags],
            cwd=self._folder,
            env=environment(**(env or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return run, process

    def process(self, *flags, code=0, **options):
        """Runs as a process and expects an exit code."""
        return finish(*self.start(*flags, **options), code=code)

    def copy_of(self, run):
        """A copy of a run's folder, to be damaged."""
        return Run(pathlib.Path(shutil.copytree(run.dir, self.new_folder())))

    def flags(self, model_dir):
        return [f"--data_dir={self._data_dir}", f"--model_dir={model_dir}", *self.lean]

    def new_folder(self):
        self._count += 1
        return self._folder / f"run{self._count}"


class ForkedCommand(Command):
    """The same as processes that start at once; see `forked`."""

    def start(self, *flags, model_dir=None, data_dir=None, **options):
        """Starts a process; returns (Run, forked.Forked). Options: those of `Forked`."""
        run = Run(pathlib.Path(model_dir or self.new_folder()))
        self._count += 1
        output = [str(self._folder / f"{name}{self._count}.txt") for name in ("out", "err")]
        where = [f"--data_dir={data_dir}"] if data_dir else []
        argv = ["trainer", *self.flags(run.dir), *where, *map(str, flags)]
        return run, forked.Forked(argv, str(self._folder), output, **options)


def words(text):
    """Flags, from the way one types them."""
    return text.split()


def documented_fields(doc):
    """Groups of fields in the tables of a command's docstring: field -> names of JSON types."""
    groups = re.split(r"^\| field \|.*\n\|---.*\n", doc, flags=re.M)[1:]
    rows = (re.findall(r"^\| (\w+) \| ([\w ]+) \|", group, re.M) for group in groups)
    return [{name: kinds.split(" or ") for name, kinds in group} for group in rows]


def check_fields(row, fields):
    """Asserts that a row has the documented fields, of the documented JSON types."""
    assert row.keys() == fields.keys()
    for name, kinds in fields.items():
        allowed = tuple(t for kind in kinds for t in np.atleast_1d(JSON_TYPES[kind]))
        assert isinstance(row[name], allowed) and not isinstance(row[name], bool), name


def finish(run, process, code=0):
    """Waits for a started process and expects an exit code."""
    run.out, run.err = process.communicate(timeout=300)
    run.code = process.returncode
    assert run.code == code, run.err
    return run


def environment(**changes):
    """The environment of a process that finds the package and the tests' modules."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**os.environ, "PYTHONPATH": paths, **changes}


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Where the small datasets are prepared, once each."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def command(tmp_path, data_dir, capfd):
    """See `Command`."""
    return Command(tmp_path, data_dir, capfd)


@pytest.fixture(scope="session")
def fork_server():
    """Lets the server of `forked` find the package and the tests' modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        multiprocessing.forkserver.set_forkserver_preload([forked.__name__])
        multiprocessing.forkserver.ensure_running()


@pytest.fixture
def forks(tmp_path, data_dir, fork_server):
    """See `ForkedCommand`."""
    return ForkedCommand(tmp_path, data_dir)


@pytest.fixture(scope="module")
def module_command(tmp_path_factory, data_dir):
    """The same for the fixtures of a module, without what was printed."""
    return Command(tmp_path_factory.mktemp("module"), data_dir)


@pytest.fixture(autouse=True)
def _forget():
    """What the parts have recorded in one test is none of the next one's business."""
    parts.SEEN.clear()
    parts.PROBE.clear()
    keras.mixed_precision.set_dtype_policy("float32")  # a run sets it for its process
