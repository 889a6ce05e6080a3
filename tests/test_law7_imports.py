"""Law 7: importing has no effect, and all can be used in one process, twice, in any order."""

import subprocess
import sys

import pytest
from conftest import ROOT, environment, words

import pipelines
import trainer


def python(code, cwd, **env):
    done = subprocess.run(
        [sys.executable, "-c", code, "--junk", "leftover"],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT_ALL = """
import importlib, pkgutil, sys
import pipelines, trainer
for package in (pipelines, trainer):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
"""


def test_importing_everything_touches_no_flag_device_or_file(tmp_path):
    code = (
        IMPORT_ALL
        + """
import tensorflow as tf
from absl import flags
known = {name for name in flags.FLAGS if flags.FLAGS.find_module_defining_flag(name, "")
         .split(".")[0] in ("pipelines", "trainer")}
assert not known, known
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
print(len(tf.config.list_logical_devices("CPU")))
"""
    )
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    home.mkdir()
    cwd.mkdir()
    assert python(code, cwd, HOME=str(home)).strip() == "2"
    assert not any(cwd.iterdir())
    assert not any(p for p in home.iterdir() if p.name[0] != "."), "more than libraries' caches"


def test_the_command_line_answers_before_tensorflow_is_loaded(tmp_path):
    code = (
        "import sys, trainer.main, pipelines, trainer\n"
        "print('tensorflow' in sys.modules, 'keras' in sys.modules)"
    )
    assert python(code, tmp_path).split() == ["False", "False"]


def test_rooms_import_one_way(tmp_path):
    code = "import pkgutil, importlib, sys, pipelines\n" + (
        "for found in pkgutil.walk_packages(pipelines.__path__, 'pipelines.'):\n"
        "    importlib.import_module(found.name)\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'trainer'))"
    )
    assert python(code, tmp_path).strip() == "[]"
    for path in (ROOT / "trainer").rglob("*.py"):
        for line in path.read_text().splitlines():
            private = line.startswith(("from pipelines.", "import pipelines."))
            assert not private, f"{path.name} goes past the face of pipelines: {line}"


def test_faces_export_what_they_list():
    for room in (pipelines, trainer):
        for name in room.__all__:
            assert getattr(room, name) is not None
        with pytest.raises(AttributeError, match="no_such_thing"):
            room.no_such_thing  # noqa: B018


def test_runs_from_python_without_flags(tmp_path, data_dir):
    config = trainer.TrainConfig(
        model="parts:linear",
        train_steps=2,
        log_steps=1,
        num_devices=2,
        export=False,
        tensorboard=False,
        model_dir=str(tmp_path / "run"),
    )
    data = pipelines.DataConfig(dataset="builders:Vectors", data_dir=str(data_dir), batch_size=4)
    result = trainer.run(config, data)
    assert result["steps"] == 2 and result["replicas"] == 2
    with pytest.raises(pipelines.UserError, match="no_such_model"):
        trainer.run(
            trainer.TrainConfig(model="no_such_model", model_dir=str(tmp_path / "other")), data
        )


def test_different_models_and_precisions_one_after_another(command):
    """A second run in a process, after another model on the same devices, and after a failure."""
    flags = words("--dataset=builders:Vectors --batch_size=6 --train_steps=2 --num_devices=2")
    first = command(*flags, "--model=parts:linear")
    command(*flags, "--model=mlp", "--mixed_precision_policy=mixed_bfloat16")
    command(*flags, "--model=parts:broken_model", code=1)
    again = command(*flags, "--model=parts:linear")
    assert {k: v.tobytes() for k, v in again.variables().items()} == {
        k: v.tobytes() for k, v in first.variables().items()
    }


def test_a_process_with_other_devices_is_told_so(command):
    run = command("--dataset=builders:Vectors", "--logical_devices=2", code=1)
    assert "--logical_devices=2" in run.error and "3 devices" in run.error
