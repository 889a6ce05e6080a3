"""metrics.jsonl, result.json, TensorBoard and log lines: what they hold and when."""

import json

import numpy as np
import parts
import pytest
import tensorflow as tf
from conftest import ROOT, words
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

RUN = words(
    "--dataset=builders:Vectors --model=parts:normed --batch_size=6 --drop_remainder=false "
    "--learning_rate=0.05 --train_steps=14 --log_steps=4 --eval_steps=5 --tensorboard=true"
)


def test_contract_of_rows_and_result(command):
    run = command(*RUN, "--num_devices=2")
    assert run.column("step") == [4, 8, 12, 14]
    assert run.column("step", "eval") == [5, 10, 14]
    assert run.column("epoch") == pytest.approx([step / 6 for step in (4, 8, 12, 14)])
    train = words(
        "split step epoch loss accuracy learning_rate grad_norm examples seconds examples_per_sec "
        "input_wait"
    )
    assert set(train) <= set(run.rows("train")[0])
    evaluation = words("split step loss accuracy examples seconds")
    assert set(evaluation) <= set(run.rows("eval")[0])
    result = run.result
    keys = words(
        "steps epochs eval best examples_per_sec startup_secs compile_secs train_secs eval_secs "
        "checkpoint_secs input_wait strategy replicas devices dataset parameters versions finished"
    )
    assert set(keys) <= set(result)
    assert (result["steps"], result["replicas"], result["finished"]) == (14, 2, True)
    assert result["epochs"] == pytest.approx(14 / 6)
    assert result["devices"] == ["CPU:0", "CPU:1"]
    expected = {"name": "vectors", "version": "1.0.0", "train_examples": 31, "eval_examples": 11}
    assert result["dataset"] == expected
    assert result["parameters"] == 4 * 6 + 4 * 6 + 6 * 3 + 3
    assert set(result["versions"]) == {"python", "tensorflow", "keras", "tensorflow_datasets"}
    for key in ("loss", "accuracy", "examples"):
        assert result["eval"][key] == run.rows("eval")[-1][key]
    best = max(run.rows("eval"), key=lambda row: row["accuracy"])
    assert result["best"]["accuracy"] == best["accuracy"]
    assert result["best"]["step"] == best["step"]


def test_values_cover_the_steps_since_the_row_before(command):
    each = command(*RUN, "--log_steps=1", "--num_devices=1")
    some = command(*RUN, "--log_steps=4", "--num_devices=1")
    edges = [0, 4, 8, 12, 14]
    weights = np.array(each.column("examples"))
    for row, first, last in zip(some.rows("train"), edges, edges[1:], strict=False):
        covered = slice(first, last)
        assert row["examples"] == weights[covered].sum()
        for key in ("loss", "accuracy"):
            mean = np.average(each.column(key)[covered], weights=weights[covered])
            assert row[key] == pytest.approx(mean, rel=1e-5)
        assert row["grad_norm"] == pytest.approx(
            np.mean(each.column("grad_norm")[covered]), rel=1e-5
        )


def test_tensorboard_shows_the_rows(command):
    run = command(*RUN, "--num_devices=2")
    events = EventAccumulator(str(run.dir / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    for split in ("train", "eval"):
        for key in ("loss", "accuracy"):
            shown = events.Tensors(f"{split}/{key}")
            assert [event.step for event in shown] == run.column("step", split)
            values = [tf.make_ndarray(event.tensor_proto).item() for event in shown]
            assert values == pytest.approx(run.column(key, split), rel=1e-6)
    assert not (command(*RUN, "--tensorboard=false").dir / "tensorboard").exists()


def test_logs_are_lines_that_a_person_can_read(command):
    run = command(*RUN, "--num_devices=2")
    lines = run.err.splitlines()
    assert sum(line.startswith("train step ") for line in lines) == 4
    assert sum(line.startswith("eval  step ") for line in lines) == 3
    (summary,) = [line for line in run.out.splitlines() if "results in" in line]
    for part in ("accuracy 0.", "on 11 examples", "14 steps", "examples/s", str(run.dir)):
        assert part in summary


def test_progress_bar_when_asked_for(command):
    run = command(*RUN, "--progress=true", "--num_devices=1")
    assert "14/14" in run.err and "training" in run.err
    assert "14/14 [" not in command(*RUN, "--num_devices=1").err


def test_files_are_strict_json(command):
    """A metric that is not a number is null in every file; best is found all the same."""
    run = command(*RUN, "--metrics=parts:not_a_number", "--num_devices=1")

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    for line in (run.dir / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    result = json.loads((run.dir / "result.json").read_text(), parse_constant=refuse)
    assert result["eval"]["not_a_number"] is None


def test_real_devices_are_named(command):
    assert command(*RUN, "--num_devices=3").result["devices"] == ["CPU:0", "CPU:1", "CPU:2"]
    one = command(*RUN, "--strategy=one_device")
    assert (one.result["strategy"], one.result["replicas"]) == ("one_device", 1)


def test_callbacks_see_every_event(command):
    command(*RUN, "--callback=parts:counting", "--num_devices=1", "--steps_per_loop=1")
    assert parts.PROBE["events"] == ["begin", *["step"] * 14, "end"]


def test_a_failing_callback_is_told_in_one_line(command):
    run = command(*RUN, "--callback=parts:fails_at_step", "--num_devices=1", code=1)
    assert run.error == "error: --callback: failed at 'step': KeyError: 'no such thing'"


def test_root_is_left_alone():
    assert not (ROOT / "runs").exists()
