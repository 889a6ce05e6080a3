"""Law 4: every example counts once, whatever the batch size or the number of replicas."""

import itertools

import numpy as np
import pytest
from conftest import words

import pipelines

TRAIN = words(
    "--dataset=builders:Many --model=parts:normed --batch_size=12 --train_steps=4 --log_steps=4 "
    "--metrics=parts:class_number --mode=train --num_devices=1"
)
EVALUATE = words(
    "--dataset=builders:Many --model=parts:normed --metrics=parts:class_number --mode=eval"
)


# (batch size, replicas)
SOME = [(1, 1), (7, 2), (128, 3), (128, 1), (4096, 3)]
ALL = list(itertools.product((1, 7, 128, 4096), (1, 2, 3)))


@pytest.mark.parametrize("pairs", [SOME, pytest.param(ALL, marks=pytest.mark.slow)])
def test_1003_examples_count_once_for_every_batch_size_and_replica_count(command, pairs):
    trained = command(*TRAIN)
    results = {}
    for size, replicas in pairs:
        flags = (f"--eval_batch_size={size}", f"--num_devices={replicas}")
        run = command(*EVALUATE, *flags, model_dir=trained.dir)
        results[size, replicas] = run.result["eval"]
    for result in results.values():
        assert result["examples"] == 1003
        first = results[1, 1]
        assert result["accuracy"] == first["accuracy"]
        assert result["class_number"] == first["class_number"] == np.mean(np.arange(1003) % 3)
        assert result["loss"] == pytest.approx(first["loss"], rel=1e-6)
    # The last one stands in the place of those before it.
    (row,) = trained.rows("eval")
    assert row["examples"] == 1003 and row["accuracy"] == results[4096, 3]["accuracy"]


def test_metrics_are_those_of_the_examples(command, data_dir):
    """Against numpy, in a split whose last batch is short and of another kind than the rest."""
    flags = words(
        "--dataset=builders:TailOfOnes --model=parts:line --task=regression --batch_size=4 "
        "--train_steps=1 --learning_rate=0 --optimizer=sgd --log_steps=1"
    )
    for replicas in (1, 2):
        run = command(*flags, "--eval_batch_size=4", f"--num_devices={replicas}")
        (row,) = run.rows("eval")
        # 8 zeros and 2 ones: the mean of batch means would be 1/3.
        assert (row["examples"], row["mse"], row["mae"]) == (10, 0.2, 0.2)


def test_every_training_example_counts_in_a_train_row(command):
    flags = words(
        "--dataset=builders:TailOfOnes --model=parts:line --task=regression --batch_size=4 "
        "--drop_remainder=false --shuffle=false --train_epochs=2 --learning_rate=0 --optimizer=sgd "
        "--log_steps=3 --mode=train"
    )
    for replicas in (1, 2):
        run = command(*flags, f"--num_devices={replicas}")
        assert run.column("examples") == [10, 10]
        assert run.column("loss") == [pytest.approx(0.2, rel=1e-6)] * 2


@pytest.mark.parametrize("size", [1, 7, 12, 100])
def test_pipeline_pads_and_masks(data_dir, size):
    config = pipelines.DataConfig(
        dataset="builders:Vectors", data_dir=str(data_dir), eval_batch_size=size
    )
    batches = list(pipelines.load_data(config, training=False).evaluation.batches(num_epochs=1))
    assert {tuple(batch["x"].shape) for batch in batches} == {(size, 4)}  # static shapes
    weights = np.concatenate([batch[pipelines.WEIGHT] for batch in batches])
    index = np.concatenate([batch[pipelines.INDEX] for batch in batches])
    assert index[weights > 0].tolist() == list(range(11))
    assert set(weights) <= {0.0, 1.0}


def test_tail_gradient_is_the_mean_of_its_own_examples(command):
    # Steps of 4, 4 and 2 examples, all with gradient 2 w x^2 of their mean: none is diluted.
    flags = words(
        "--dataset=builders:TailOfOnes --model=parts:line --task=regression --batch_size=4 "
        "--drop_remainder=false --shuffle=false --train_epochs=1 --learning_rate=0.25 "
        "--optimizer=sgd --log_steps=1 --mode=train"
    )
    for replicas in (1, 2):
        run = command(*flags, f"--num_devices={replicas}")
        # Only the two ones of the last batch have a gradient: 2.
        assert run.column("grad_norm") == pytest.approx([0, 0, 2])
        (weight,) = run.weights().values()
        assert weight.item() == pytest.approx(0.5)
