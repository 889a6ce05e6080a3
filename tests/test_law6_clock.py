"""Law 6: one clock, for examples really trained and seconds really training."""

import time

import parts
import pytest
from conftest import words

RUN = words(
    "--dataset=builders:Vectors --model=parts:linear --batch_size=4 --drop_remainder=false "
    "--log_steps=8 --train_steps=32 --jit_compile=false --num_devices=1"
)


def test_rows_and_result_agree(command):
    started = time.monotonic()
    run = command(*RUN, "--export=true")
    wall = time.monotonic() - started
    result, rows = run.result, run.rows("train")
    # An epoch is 31 examples in 8 steps, the last of 3 examples.
    assert run.column("examples") == [31] * 4
    assert run.column("epoch") == [1, 2, 3, 4]
    for row in rows:
        assert row["examples_per_sec"] == pytest.approx(row["examples"] / row["seconds"])
        assert 0 <= row["input_wait"] <= 1
    assert sum(run.column("seconds")) == pytest.approx(result["train_secs"], rel=1e-6)
    rate = 4 * 31 / sum(run.column("seconds"))
    assert result["examples_per_sec"] == pytest.approx(rate, rel=1e-6)
    kinds = ("compile", "train", "eval", "checkpoint")
    parts_of_run = {kind: result[f"{kind}_secs"] for kind in kinds}
    assert all(secs > 0 for secs in parts_of_run.values())
    assert sum(parts_of_run.values()) <= wall
    assert sum(run.column("seconds", "eval")) <= result["eval_secs"]
    assert f"{result['examples_per_sec']:,.0f} examples/s" in run.out


def test_what_is_not_training_does_not_count(command):
    """Evaluation, callbacks and the first trace: only training is timed as training."""
    flags = (*RUN, "--eval_steps=8", "--metrics=parts:slow_evaluation", "--eval_batch_size=11")
    run = command(*flags, "--callback=parts:dawdle")
    assert run.result["eval_secs"] >= 4 * 0.3
    assert min(run.column("seconds", "eval")) >= 0.3
    # The first row holds the start of the input; 24 steps of this model take a few milliseconds.
    assert sum(run.column("seconds")[1:]) < 0.3 < run.result["compile_secs"]


def test_input_wait_is_the_share_spent_waiting(command):
    slow_input = command(*RUN, "--augment=parts:slow", "--num_parallel_calls=1")
    assert slow_input.result["input_wait"] > 0.6
    assert slow_input.result["train_secs"] > 0.5  # the wait is part of training
    slow_step = command(*RUN, "--loss=parts:slow_loss", "--train_steps=256")
    assert slow_step.result["input_wait"] < 0.3
    assert slow_step.result["train_secs"] > 256 * 0.01


def test_rate_counts_global_examples(command):
    for replicas in (1, 2):
        run = command(*RUN, f"--num_devices={replicas}")
        assert sum(run.column("examples")) == 124


def test_clock_goes_on_after_a_stop(command):
    flags = (*RUN, "--mode=train")
    stop = ("--callback=parts:terminate_at_step_7", "--steps_per_loop=1", "--loss=parts:slow_loss")
    stopped = command(*flags, *stop, code=143)
    assert stopped.rows("train") == []
    resumed = command(*flags, "--loss=parts:slow_loss", model_dir=stopped.dir)
    # The first row covers steps of both processes: its seconds are those of both.
    first = resumed.rows("train")[0]
    assert first["examples"] == 31
    assert first["seconds"] >= 8 * 0.01
    assert sum(resumed.column("seconds")) == pytest.approx(resumed.result["train_secs"])


def test_one_compilation_for_all_steps(command):
    command(
        *RUN, "--log_steps=3", "--eval_steps=5", "--checkpoint_steps=7", "--callback=parts:probe"
    )
    assert parts.PROBE["traces"] == 1
