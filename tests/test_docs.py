"""The documents speak of what is there, and what they show runs."""

import importlib
import pkgutil
import re
import subprocess
import sys

import pytest
from conftest import ROOT, environment

import pipelines
import trainer
from pipelines import cli, config
from trainer import config as trainer_config

DOCUMENTS = [ROOT / name for name in ("README.md", "WORKSPACE.md", "BUILD_NOTES.md")]
# Files of a run, of a user, or of the machine: named, but not part of the tree.
NOT_IN_THE_TREE = re.compile(
    r"(runs|export|checkpoints|best|tensorboard|\.venv|my_code|cache|data|~|ckpt-|dist|build)\b"
)


def text_of(document):
    if not document.exists():
        pytest.skip(f"{document.name} is not written yet")
    return document.read_text()


def python_blocks(document):
    if not document.exists():
        return []
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)


def defined_flags():
    """Names of the flags of all commands."""
    names = set()
    for room in (pipelines, trainer):
        for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            define = getattr(importlib.import_module(found.name), "define_flags", None)
            if define:
                names |= set(cli.parse_flags(["test"], "", define))
    return names


@pytest.mark.parametrize("number", range(len(python_blocks(ROOT / "WORKSPACE.md")) or 1))
def test_python_blocks_of_the_map_run(tmp_path, number):
    text_of(ROOT / "WORKSPACE.md")
    done = subprocess.run(
        [sys.executable, "-c", python_blocks(ROOT / "WORKSPACE.md")[number]],
        cwd=tmp_path,
        env=environment(TFDS_DATA_DIR=str(tmp_path / "data")),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_map_shows_a_pipeline_and_a_task():
    text_of(ROOT / "WORKSPACE.md")
    blocks = python_blocks(ROOT / "WORKSPACE.md")
    assert any("load_data" in block for block in blocks)
    assert any("Task)" in block and "trainer.run" in block for block in blocks)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_exist(document):
    text = text_of(document)
    named = re.findall(r"\]\((?!http)([^)#]+)[)#]", text)
    named += re.findall(r"`([\w.~-]+(?:/[\w.-]+)+/?|[\w-]+\.(?:py|md|toml|npz|sh))`", text)
    for name in named:
        if NOT_IN_THE_TREE.match(name) or "://" in name or "*" in name:
            continue
        places = [ROOT / name, *(ROOT / room / name for room in ("pipelines", "trainer", "tests"))]
        assert any(place.exists() for place in places), f"{document.name} names {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_flags_exist(document):
    known = defined_flags() | {"flagfile"}
    for line in text_of(document).replace("\\\n", " ").splitlines():
        if re.search(r"\b(pip|ruff|pytest|tensorboard|git|xla)\b", line):
            continue  # flags of others
        for name in re.findall(r"(?<![\w-])--(?:no)?([a-z]\w+)", line):
            assert name in known or f"no{name}" in known, f"{document.name}: --{name}"


def test_readme_names_the_two_commands():
    text = text_of(ROOT / "README.md")
    blocks = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, re.M | re.S)
    assert "trainer.main" in blocks[0] and "venv" in blocks[0]
    assert "pytest" in blocks[1] and "venv" in blocks[1]


def test_modules_are_on_the_map():
    text = text_of(ROOT / "WORKSPACE.md")
    for room in ("pipelines", "trainer"):
        for path in (ROOT / room).rglob("*.py"):
            if path.stem not in ("__init__",):
                assert path.stem in text, f"{path.relative_to(ROOT)} is not in WORKSPACE.md"


def test_every_flag_has_a_help_text_with_a_capital_and_a_full_stop():
    values = cli.parse_flags(["test"], "", trainer_config.define_flags, config.define_flags)
    for name in values:
        text = values[name].help
        if name not in ("flagfile", "undefok", "?"):
            assert len(text) > 10 and text.rstrip().endswith("."), f"--{name}: {text}"
