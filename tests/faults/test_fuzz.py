"""Any flag, flagfile, split or file: it works, or one line says why not."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipelines
from pipelines import UserError, cli, index, source
from trainer import config as config_lib
from trainer.report import Report

FUZZ = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FLAGS = ("--batch_size=4", "--train_steps=3", "--augment=flip", "--seed=1", "--hidden_units=8,8")


def names():
    """Names of flags, right and nearly right."""
    known = [
        *config_lib.TrainConfig.__dataclass_fields__,
        *pipelines.DataConfig.__dataclass_fields__,
    ]
    return st.sampled_from([*known, "flagfile", "verbosity", "undefok", "help"]) | st.text(
        max_size=9
    )


def values():
    """Values of flags, of all types and none."""
    numbers = st.integers() | st.floats()
    lists = st.lists(numbers, max_size=4).map(lambda found: ",".join(map(str, found)))
    words = st.sampled_from(
        ["true", "false", "auto", "module:function", "(", "name>=1", "", "%", "1e999"]
    )
    return numbers.map(str) | lists | words | st.text(max_size=12)


def arguments():
    flag = st.builds("--{}={}".format, names(), values())
    return st.lists(flag | st.builds("--{}".format, names()) | st.text(max_size=9), max_size=4)


def parse(argv):
    """Both configurations; None if one line says why not."""
    try:
        values = cli.parse_flags(argv, "doc", config_lib.define_flags, pipelines.define_flags)
        found = config_lib.config_from_flags(values), pipelines.config_from_flags(values)
    except UserError as error:
        assert str(error).strip()
        return None
    except SystemExit as stop:
        assert stop.code == 0  # --help
        return None
    text = cli.flags_text(values)
    return *found, text


@given(arguments=arguments())
def check_arguments(tmp_path, arguments):
    found = parse(["trainer", *arguments])
    if found is None:
        return
    # What is written to flags.txt reproduces the run.
    flagfile = tmp_path / "flags.txt"
    flagfile.write_text(found[2], encoding="utf-8")
    again = parse(["trainer", f"--flagfile={flagfile}"])
    assert again is not None, found[2]
    assert repr(again[:2]) == repr(found[:2])


def lines():
    comments = st.sampled_from(["# a comment", "// another", "", " ", "--flagfile=flags.txt"])
    return st.lists(st.sampled_from(FLAGS) | comments | values() | arguments().map(" ".join))


@given(content=lines().map("\n".join).map(lambda t: t.encode("utf-8", "replace")) | st.binary())
def check_flagfile(tmp_path, content):
    flagfile = tmp_path / "flags.txt"
    flagfile.write_bytes(content)
    parse(["trainer", f"--flagfile={flagfile}"])


def splits():
    """Split instructions, right and nearly right."""
    bounds = st.integers(-40, 140).map(str) | st.sampled_from(["", "50%", "-1%", "1.5%", "a", "²"])
    sliced = st.builds(
        "{}[{}:{}]{}".format,
        st.sampled_from(["train", "test", "no", ""]),
        bounds,
        bounds,
        st.sampled_from(["", "(pct1_dropremainder)", "(x)", "]"]),
    )
    return st.lists(sliced | st.text(max_size=8), min_size=1, max_size=3).map("+".join)


@given(train=splits(), evaluation=splits() | st.none())
def check_splits(vectors, train, evaluation):
    config = pipelines.DataConfig(train_split=train, eval_split=evaluation)
    try:
        found = source.choose_splits(vectors, config, evaluating=True)
    except UserError as error:
        assert "_split=" in str(error)
        return
    for split in found:
        assert split.num_examples == sum(s.count for s in source.stretches(vectors, split)) > 0


@given(data=st.data())
def check_records(shard, data):
    path, whole = shard
    at = data.draw(st.integers(0, len(whole)))
    damage = data.draw(st.binary(max_size=20))
    kind = data.draw(st.sampled_from(["replace", "insert", "cut", "all"]))
    path.write_bytes(
        {
            "replace": whole[:at] + damage + whole[at + len(damage) :],
            "insert": whole[:at] + damage + whole[at:],
            "cut": whole[:at],
            "all": damage * at,
        }[kind]
    )
    offsets = index.walk(str(path))
    assert (
        offsets[0] == 0
        and offsets[-1] <= path.stat().st_size
        and (offsets[1:] > offsets[:-1]).all()
    )
    builder = source.open_builder(pipelines.DataConfig(dataset=str(path.parent)))
    split = source.Split("train", 0, 31)
    for skip in (False, True):
        try:
            records = pipelines.records.Records(builder, split, skip)
            found = records.read(range(31))
        except UserError as error:
            assert str(path) in str(error)
            assert not skip or "none of the split's 31 records" in str(error)
            continue
        lost = sum(record == b"" for record in found)
        assert len(found) == 31 and lost == len(records.bad)
        if not skip:
            assert not lost


@given(content=st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def check_rows(tmp_path, content):
    report = Report(tmp_path, tensorboard=False)
    whole = b'{"split": "train", "step": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(whole + content)
    report.rewind(1)
    kept = report.rows()
    assert kept[0] == {"split": "train", "step": 1}
    report.write({"split": "train", "step": 2})
    report.close()
    assert report.rows() == [*kept, {"split": "train", "step": 2}]


@pytest.fixture
def vectors(data_dir):
    config = pipelines.DataConfig(dataset="builders:Vectors", data_dir=str(data_dir))
    return source.open_builder(config)


@pytest.fixture
def shard(vectors, tmp_path):
    """(path, content) of the training records of a copy."""
    folder = tmp_path / "vectors" / "1.0.0"
    shutil.copytree(vectors.data_dir, folder)
    (path,) = folder.glob("*train.tfrecord*")
    return path, path.read_bytes()


CHECKS = {
    "arguments": (check_arguments, 200, 5000),
    "flagfile": (check_flagfile, 60, 3000),
    "splits": (check_splits, 300, 5000),
    "records": (check_records, 100, 2000),
    "rows": (check_rows, 200, 3000),
}


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHECKS)
def test_fuzz(name, many, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check, few, count = CHECKS[name]
    fixtures = {
        known: request.getfixturevalue(known)
        for known in ("tmp_path", "vectors", "shard")
        if known in check.hypothesis.inner_test.__code__.co_varnames
    }
    settings(FUZZ, max_examples=count if many else few)(check)(**fixtures)
