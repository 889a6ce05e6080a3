"""python -m trainer.benchmark: what it measures, what it writes, what it refuses."""

import csv
import io
import json

import keras
import numpy as np
import pytest
from conftest import check_fields, documented_fields, words

from pipelines import cli
from trainer import baselines, benchmark

QUICK = words("--num_steps=4 --num_warmup_steps=2 --repeats=2 --progress=false")
OURS = ["input", "step", "end_to_end"]
OTHERS = ["textbook_slicing", "textbook_gather", "model_fit", "model_fit_best"]


@pytest.fixture
def run(data_dir, capfd):
    """Runs the command in this process; returns (exit code, stdout, stderr)."""

    def run(*flags):
        capfd.readouterr()
        base = ["--dataset=builders:Vectors", f"--data_dir={data_dir}", "--batch_size=6"]
        with pytest.raises(SystemExit) as stop:
            cli.run(benchmark.main, ["benchmark", *base, "--model=parts:normed", *QUICK, *flags])
        return stop.value.code, *capfd.readouterr()

    return run


def test_rows_keep_to_the_documented_schema(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    flags = words("--compare --num_devices=2 --jit_compile=false --format=jsonl --l2=0.1")
    code, out, err = run(*flags, f"--output={path}")
    assert (code, out) == (0, "")
    assert "the loops compared with leave out of their steps: --l2\n" in err
    *rows, summary = [json.loads(line) for line in path.read_text().splitlines()]
    common, measured, conclusion = documented_fields(benchmark.__doc__)
    for row in rows:
        check_fields(row, common | measured)
    check_fields(summary, common | conclusion)
    names = [row["variant"] for row in rows]
    assert names == [*OURS, "one_device", "straightforward_loop", *OTHERS]
    by_name = {row["variant"]: row for row in rows}
    ours = by_name["end_to_end"]
    assert ours["ratio"] == 1 and ours["replicas"] == 2
    for row in rows:
        assert row["steps_per_sec_min"] <= row["steps_per_sec"] <= row["steps_per_sec_max"]
        assert row["examples_per_sec"] == pytest.approx(6 * row["steps_per_sec"])
        assert row["ratio"] == pytest.approx(ours["steps_per_sec"] / row["steps_per_sec"])
        assert row["steps"] >= 4 and (row["warmup_steps"], row["repeats"]) == (2, 2)
    assert "steps_per_execution=" in by_name["model_fit_best"]["settings"]
    slower, faster = sorted(("input", "step"), key=lambda name: by_name[name]["steps_per_sec"])
    assert summary["bound"] == slower
    quotient = by_name[faster]["steps_per_sec"] / by_name[slower]["steps_per_sec"]
    assert summary["bound_factor"] == pytest.approx(quotient)


def test_short_last_batches_count_what_they_hold(run):
    _, out, _ = run("--num_devices=1", "--drop_remainder=false", "--format=csv")
    row = next(csv.DictReader(io.StringIO(out)))
    assert float(row["examples_per_sec"]) == pytest.approx(31 / 6 * float(row["steps_per_sec"]))


def test_table_is_for_people(run):
    code, out, err = run("--num_devices=1", "--train_epochs=3", "--summary")
    assert code == 0
    head, *rows, last = out.splitlines()
    assert head.split()[:2] == ["variant", "steps/s"]
    assert [row.split()[0] for row in rows] == OURS
    assert "bounds" in last
    unused = next(line for line in err.splitlines() if "without effect in a benchmark" in line)
    assert "--train_epochs" in unused and "--summary" in unused


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--output=/no/such/folder/rows.csv", "--output=/no/such/folder/rows.csv"),
        ("--format=xml", "format"),
        ("--repeats=0", "repeats"),
        ("--compare --dataset=builders:Line --model=parts:linear", "--compare"),
        ("--compare --task=gan", "--compare"),
        ("--lr_schedule=nope", "--lr_schedule=nope"),
        ("--batch_size=4 --num_devices=3", "--batch_size=4 cannot be split evenly over 3"),
        ("--batch_size=4 --grad_accum_steps=3 --num_devices=1", "3 accumulation steps"),
        ("--loss=parts:broken_loss --num_devices=1", "ValueError: no such term"),
        ("--optimizer=sgd --learning_rate=1e30 --num_devices=1", "is not finite"),
    ],
)
def test_mistakes_are_told_in_one_line(run, flags, told):
    code, out, err = run(*words(flags))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: ") and told in err.splitlines()[-1]


def test_fit_is_timed_in_whole_executions():
    def make_model():
        return keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])

    images, labels = np.zeros([10, 4], np.float32), np.zeros([10], np.int64)
    job = baselines.Job(make_model, keras.optimizers.SGD, images, labels, 3, batch_size=2)
    run = baselines.model_fit(job, None, steps_per_execution=4)
    for warmup_steps, num_steps in ((0, 1), (1, 2), (5, 6)):
        turn = run(warmup_steps, num_steps)
        assert turn.steps >= num_steps and turn.secs > 0
        assert turn.steps % 4 == 0  # of the five steps of an epoch Keras would count eight


def test_what_mixes_examples_can_be_measured(run):
    flags = words("--dataset=builders:Images --model=parts:linear --augment=mixup --num_devices=1")
    assert run(*flags)[0] == 0


def test_any_task_can_be_measured(run):
    flags = words("--task=gan --model=auto --dataset=builders:Images --latent_dim=5")
    code, out, _ = run(*flags, "--num_devices=1", "--format=jsonl")
    assert code == 0
    assert [json.loads(line)["variant"] for line in out.splitlines()] == [*OURS, "summary"]
