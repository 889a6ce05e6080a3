"""The order law as arithmetic: permutations, windows, padding, and how well they mix."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.order import Order
from pipelines.randomness import example_seeds, uniform


def epoch_of(order, epoch):
    return order.epoch(epoch).numpy()


def orders(n, **fields):
    return [Order(n, **fields), Order(n, window=max(1, n // 3), block=max(1, n // 20), **fields)]


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 300),
    batch=st.integers(1, 40),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 2**40),
)
def test_every_epoch_is_a_permutation(n, batch, seed, epoch):
    for order in orders(n, batch_size=batch, seed=seed, drop_remainder=False):
        positions = epoch_of(order, epoch)
        assert len(positions) == -(-n // batch) * batch
        assert sorted(positions[:n]) == list(range(n))
        last_batch = positions[n - (n % batch or batch) : n]
        assert set(positions[n:]) <= set(last_batch)  # padding repeats the batch's own
        dropped = epoch_of(dataclasses.replace(order, drop_remainder=True), epoch)
        np.testing.assert_array_equal(dropped, positions[: len(dropped)])


def test_batches_are_slices_of_epochs_and_seeds_differ():
    for order in orders(100, batch_size=7, seed=5):
        assert order.batch(14 + 3) == epoch_of(order, 1)[21:28].tolist()
        assert (epoch_of(order, 0) != epoch_of(order, 1)).any()
        other = dataclasses.replace(order, seed=6)
        assert (epoch_of(order, 0) != epoch_of(other, 0)).any()


def test_without_shuffling_file_order_is_kept():
    np.testing.assert_array_equal(epoch_of(Order(5, 2, shuffle=False), 3), range(4))


def test_windows_hold_whole_blocks():
    order = Order(1000, 10, window=100, block=10)
    windows = epoch_of(order, 0).reshape(10, 100)
    for window in windows:
        assert len({position // 10 for position in window}) == 10
    firsts = [window.min() // 10 for window in windows]
    assert firsts != sorted(firsts)  # blocks come from everywhere


def scores(epochs):
    """z-scores that are near normal for uniformly random permutations, rows of int [e, n]."""
    n = epochs.shape[1]
    ranks = np.arange(n)
    found = {}
    for i, order in enumerate(epochs):
        found[f"file {i}"] = np.corrcoef(order, ranks)[0, 1] * np.sqrt(n)
        kept = (np.abs(np.diff(order)) == 1).sum()
        found[f"neighbours {i}"] = (kept - 2) / np.sqrt(2)  # Poisson with mean 2
        half = order[: n // 2] % 2
        found[f"parity {i}"] = (half.sum() - n / 4) / np.sqrt(n / 16)
        for j in range(i):
            found[f"epochs {i}, {j}"] = np.corrcoef(order, epochs[j])[0, 1] * np.sqrt(n)
            same = (order == epochs[j]).sum()
            found[f"same place {i}, {j}"] = same - 1
    return found


def worst(found, prefix):
    return max(abs(value) for key, value in found.items() if key.startswith(prefix))


def test_ten_epochs_of_60000_look_random():
    order = Order(60_000, 100, seed=3)
    epochs = np.stack([epoch_of(order, e) for e in range(10)])
    found = scores(epochs)
    for kind in ("file", "epochs", "parity"):
        assert worst(found, kind) < 4, kind
    assert worst(found, "neighbours") < 6  # the tail of a Poisson distribution is long
    assert worst(found, "same place") < 8


def test_huge_epochs_look_random_too(monkeypatch):
    monkeypatch.setattr("pipelines.order._MAX_SORTED", 1000)
    order = Order(60_000, 100, seed=3)
    epochs = np.stack([epoch_of(order, e) for e in range(4)])
    assert sorted(epochs[0]) == list(range(60_000))
    found = scores(epochs)
    for kind in ("file", "epochs", "parity"):
        assert worst(found, kind) < 4, kind
    assert worst(found, "neighbours") < 6


def shuffle_buffer(n, size, rng):
    """The order of `Dataset.shuffle(size)` over files read from front to back."""
    buffer, out = list(range(min(size, n))), []
    for i in range(n):
        at = rng.integers(len(buffer))
        out.append(buffer[at])
        if size + i < n:
            buffer[at] = size + i
        else:
            buffer[at] = buffer[-1]
            buffer.pop()
    return np.array(out)


def test_windows_mix_better_than_a_buffer_of_the_same_memory():
    # Data sorted by class, as a naive preparation leaves it: ten classes in a row.
    n, memory, batch = 20_000, 1000, 100
    order = Order(n, batch, seed=1, window=memory, block=10)
    ours, plain = epoch_of(order, 0), shuffle_buffer(n, memory, np.random.default_rng(0))

    def correlation(positions):
        return abs(np.corrcoef(positions, np.arange(n))[0, 1])

    def classes_per_batch(positions):
        classes = positions.reshape(-1, batch) * 10 // n
        return np.mean([len(set(row)) for row in classes])

    assert correlation(plain) > 0.9
    assert correlation(ours) < 0.1
    assert classes_per_batch(plain) < 4
    assert classes_per_batch(ours) > 9.5  # of 10; a full shuffle of sorted data gives 9.9997


@pytest.mark.parametrize("draw", [0, 1, 21])
def test_draws_are_uniform_and_independent(draw):
    n = 20_000
    zeros = tf.zeros([n], tf.int64)
    seeds = example_seeds(7, zeros, tf.range(n, dtype=tf.int64))
    assert len(set(map(tuple, seeds.numpy()))) == n
    values = uniform(seeds, draw).numpy()
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, 20, (0, 1))[0]
    assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 60  # chi squared with 19 degrees of freedom
    for other in (
        uniform(seeds, draw + 1),
        uniform(example_seeds(7, zeros + 1, tf.range(n, dtype=tf.int64)), draw),
    ):
        assert abs(np.corrcoef(values, other.numpy())[0, 1]) < 4 / np.sqrt(n)
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 4 / np.sqrt(n)
