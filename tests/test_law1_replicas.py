"""Law 1: replicas change speed, nothing else."""

import numpy as np
import parts
import pytest
from conftest import words

REPLICAS = (1, 2, 3)
REFERENCE = words(
    "--dataset=builders:Reference --model=parts:line --batch_size=12 --optimizer=sgd "
    "--learning_rate=0.01 --train_steps=1 --log_steps=1 --mode=train --callback=parts:probe"
)
# 31 examples in batches of 12: the last batch of an epoch holds 7 examples and 5 of padding.
AWKWARD = words(
    "--dataset=builders:Vectors --batch_size=12 --drop_remainder=false --train_epochs=2 "
    "--log_steps=1 --eval_steps=3 --learning_rate=0.05 --callback=parts:probe"
)
CASES = {
    "accumulation": "--model=parts:normed --grad_accum_steps=2 --grad_clip_norm=0.3",
    "mlp": "--model=mlp --hidden_units=8 --optimizer=adamw --weight_decay=0.1 --l2=0.1 "
    "--grad_clip_norm_per_variable=0.1 --ema_decay=0.5",
    "regression": "--dataset=builders:Line --model=parts:linear --metrics=parts:absolute "
    "--regularizer=parts:weight_squared --grad_clip_value=0.5",
    "mixed": "--dataset=builders:Images --model=parts:linear --augment=flip,mixup,cutmix "
    "--label_smoothing=0.1",
}
SLOW_CASES = {
    "batch_norm": "--model=parts:normed --optimizer=sgd --momentum=0.9 --class_weights=1,0.5,3 "
    "--label_smoothing=0.1",
    "compiled": "--model=mlp --hidden_units=8 --jit_compile=true",
    "sgd": "--model=parts:linear --optimizer=sgd",
    "adam": "--model=mlp --hidden_units=8",
    "l2": "--model=mlp --hidden_units=8 --l2=0.1 --optimizer=sgd",
    "clipping": "--model=parts:linear --optimizer=sgd --momentum=0.9 --grad_clip_norm=0.3",
    "conv": "--dataset=builders:Images --model=parts:smooth_resnet --batch_size=30 "
    "--train_epochs=1 --optimizer=sgd",
}
ALL_CASES = [
    *CASES.items(),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES.items()),
]


@pytest.mark.parametrize("replicas", REPLICAS)
def test_reference_problem(command, replicas):
    run = command(*REFERENCE, f"--num_devices={replicas}")
    assert run.column("loss") == [pytest.approx(7.5, rel=1e-6)]
    assert run.column("grad_norm") == [pytest.approx(15, rel=1e-6)]
    weights = parts.PROBE["copies"]["0.kernel"]
    assert len(weights) == replicas
    np.testing.assert_allclose(weights, 0.85, rtol=1e-6)
    assert run.result["replicas"] == replicas


@pytest.mark.parametrize(("case", "flags"), ALL_CASES)
def test_same_numbers_on_any_number_of_replicas(command, case, flags):
    runs, copies = {}, {}
    for replicas in REPLICAS:
        runs[replicas] = command(*AWKWARD, *flags.split(), f"--num_devices={replicas}")
        copies[replicas] = parts.PROBE["copies"]
    for replicas in REPLICAS[1:]:
        for split in ("train", "eval"):
            assert len(runs[replicas].rows(split)) == len(runs[1].rows(split)) > 0
            for ours, one in zip(runs[replicas].rows(split), runs[1].rows(split), strict=True):
                assert numbers(ours) == pytest.approx(numbers(one), rel=1e-5, abs=1e-6)
        assert copies[replicas].keys() == copies[1].keys()
        for path, values in copies[replicas].items():
            assert len(values) == replicas
            for value in values:
                np.testing.assert_array_equal(value, values[0], err_msg=path)
            one = copies[1][path][0]
            np.testing.assert_allclose(values[0], one, rtol=1e-4, atol=1e-5, err_msg=path)


def numbers(row):
    """What of a row may not depend on speed."""
    timing = ("seconds", "examples_per_sec", "input_wait")
    return {k: v for k, v in row.items() if isinstance(v, (int, float)) and k not in timing}


def test_batch_that_cannot_be_split(command):
    run = command(*REFERENCE, "--batch_size=8", "--num_devices=3", code=1)
    assert "8" in run.error and "3 replicas" in run.error
    run = command(*REFERENCE, "--batch_size=6", "--grad_accum_steps=2", "--num_devices=2", code=1)
    assert "6" in run.error and "2 replicas x 2 accumulation steps" in run.error


def test_replicas_drop_different_units(command):
    flags = "--model=parts:dropped --loss=parts:sees_outputs --jit_compile=false --train_steps=4"
    command(*REFERENCE, *flags.split(), "--num_devices=2", "--shuffle=false")
    # The replicas see x = 1 2 3 4 1 2 and 3 4 1 2 3 4; both drop the half, not the same half.
    kept = [np.split(outputs != 0, 2) for outputs in parts.seen().values()]
    assert len(kept) == 4
    assert any((first != second).any() for first, second in kept)
    for path, values in parts.PROBE["copies"].items():
        np.testing.assert_array_equal(values[0], values[1], err_msg=path)


def test_logical_devices_of_the_command_line(command):
    flags = [*AWKWARD, "--model=parts:normed"]
    run = command.process(*flags, "--logical_devices=2")
    assert run.result["replicas"] == 2
    assert run.result["devices"] == ["CPU:0", "CPU:1"]
    one = command(*flags, "--num_devices=1")
    assert run.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)
    for name, value in run.weights().items():
        np.testing.assert_allclose(value, one.weights()[name], rtol=1e-4, atol=1e-6)
