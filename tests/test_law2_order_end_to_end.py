"""Law 2: order is arithmetic, as a loss and an augmentation inside the compiled step see it."""

import numpy as np
import parts
import pytest
from conftest import words

import pipelines

# A loss that notes the ids of the examples it is given, in the order of the replicas' rows.
SEEING = words(
    "--dataset=builders:Ids --task=regression --model=parts:linear --loss=parts:sees_labels "
    "--jit_compile=false --mode=train --batch_size=6 --seed=3"
)


def ids(command, *flags):
    """step -> ids of the whole batch."""
    command(*SEEING, *flags)
    return {step: [int(i) for i in labels] for step, labels in parts.seen().items()}


def batches_by_hand(data_dir, num_steps, **settings):
    """The same through the Python face."""
    config = pipelines.DataConfig(
        dataset="builders:Ids", data_dir=str(data_dir), batch_size=6, seed=3, **settings
    )
    pipeline = pipelines.load_data(config, evaluating=False, numeric_labels=True).train
    batches = pipeline.batches().take(num_steps).as_numpy_iterator()
    return {step: batch["id"].tolist() for step, batch in enumerate(batches)}


def test_replicas_and_threads_do_not_change_batches(command, data_dir):
    expected = batches_by_hand(data_dir, 12)
    assert len(expected) == 12
    for replicas, threads in ((1, 1), (2, 8), (3, 2)):
        flags = (f"--num_devices={replicas}", f"--num_parallel_calls={threads}")
        assert ids(command, *flags, "--train_steps=12", "--prefetch_batches=3") == expected


@pytest.mark.parametrize("stop_at", [4, 8])
def test_a_restart_goes_on_where_it_stopped(command, tmp_path, data_dir, stop_at):
    folder = tmp_path / "restarted"
    seen = ids(command, f"--train_steps={stop_at}", f"--model_dir={folder}", "--num_devices=2")
    assert len(seen) == stop_at
    more = ids(command, "--train_steps=12", f"--model_dir={folder}", "--num_devices=3")
    assert min(more) == stop_at
    assert {**seen, **more} == batches_by_hand(data_dir, 12)


def test_every_epoch_visits_each_example_once_in_its_own_order(command):
    seen = ids(command, "--train_epochs=3", "--drop_remainder=false", "--num_devices=2")
    assert len(seen) == 18
    epochs = [joined(seen, range(6 * e, 6 * e + 6))[:31] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(31)) != epoch
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def joined(seen, steps):
    return [i for step in steps for i in seen[step]]


def test_what_is_dropped_differs_between_epochs(command):
    seen = ids(command, "--train_epochs=4", "--num_devices=1")
    epochs = [joined(seen, range(5 * e, 5 * e + 5)) for e in range(4)]
    assert all(len(set(epoch)) == 30 for epoch in epochs)
    assert len({(set(range(31)) - set(epoch)).pop() for epoch in epochs}) > 1


def test_seed_and_shuffle(data_dir):
    assert batches_by_hand(data_dir, 5, shuffle=False)[4] == list(range(24, 30))
    config = {"dataset": "builders:Ids", "data_dir": str(data_dir), "batch_size": 31}
    orders = []
    for seed in (0, 1, 2**31 + 1, 2**63 + 1):
        data = pipelines.load_data(pipelines.DataConfig(**config, seed=seed), evaluating=False)
        orders.append(next(iter(data.train.batches()))["id"].numpy().tolist())
    assert len({tuple(order) for order in orders}) == 4


def test_sorted_classes_come_out_mixed(data_dir):
    config = pipelines.DataConfig(
        dataset="builders:SortedByClass", data_dir=str(data_dir), batch_size=30
    )
    for batch in pipelines.load_data(config).train.batches(num_epochs=2):
        assert np.bincount(batch["y"], minlength=3).min() >= 2


def test_held_out_examples_are_never_trained_on(data_dir):
    config = pipelines.DataConfig(
        dataset="builders:TrainOnly", data_dir=str(data_dir), batch_size=5, drop_remainder=False
    )
    data = pipelines.load_data(config)
    held_out = {
        row.tobytes() for batch in data.evaluation.batches(num_epochs=1) for row in kept(batch)
    }
    trained = {row.tobytes() for batch in data.train.batches(num_epochs=5) for row in kept(batch)}
    assert len(held_out) == 2 and len(trained) == 18
    assert not held_out & trained


def kept(batch):
    """The inputs of a batch without padding."""
    return batch["x"].numpy()[batch[pipelines.WEIGHT].numpy() > 0]


def test_augmentation_depends_on_seed_epoch_and_example_alone(command):
    flags = [
        *SEEING,
        *words("--dataset=builders:Numbered --augment=parts:draw,parts:numpy_noise"),
        "--train_epochs=3",
        "--drop_remainder=false",
    ]

    def draws(*more):
        command(*flags, *more)
        seen = parts.seen()
        batches = [seen[step] for step in sorted(seen)]
        epochs = np.split(np.concatenate(batches), 3)
        return [{int(v): v % 1 for v in epoch} for epoch in epochs]

    first = draws("--batch_size=6", "--num_devices=1")
    assert [len(epoch) for epoch in first] == [24] * 3
    assert len(set(first[0].values())) == 24  # differs between examples
    assert all(first[0][i] != first[1][i] for i in range(24))  # and between epochs
    assert draws("--batch_size=8", "--num_devices=2", "--num_parallel_calls=5") == first
    assert draws("--batch_size=6", "--seed=4", "--num_devices=1") != first
