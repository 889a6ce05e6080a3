"""A long run stays as it was: memory, open files, traces, speed."""

import statistics

import parts
import pytest
from conftest import words

FLAGS = words(
    "--dataset=builders:Vectors --model=parts:linear --batch_size=4 --num_devices=1 "
    "--log_steps=1000 --eval_steps=5000 --checkpoint_steps=5000 --tensorboard=true "
    "--callback=parts:watches_itself"
)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [20_000, 200_000])
def test_nothing_grows(command, steps):
    run = command(*FLAGS, f"--train_steps={steps}")
    watched = parts.PROBE["watched"]
    assert [row[0] for row in watched] == list(range(1000, steps + 1, 1000))
    tenth = len(watched) // 10
    warm, last = watched[2 * tenth], watched[-1]
    assert last[1] < warm[1] * 1.02, "memory grew"
    assert last[2] <= warm[2], "files stay open"
    assert last[3] == watched[0][3] == 1, "the step was traced again"
    rates = [row["examples_per_sec"] for row in run.rows("train")]
    early, late = (statistics.median(part) for part in (rates[tenth : 3 * tenth], rates[-tenth:]))
    assert late > 0.7 * early, "slower at the end"
    assert run.result["steps"] == steps and len(rates) == steps // 1000
