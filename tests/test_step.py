"""The step: loss, gradient, what is done to it, and the optimizer's update, on several replicas."""

import re
import subprocess
import sys

import keras
import numpy as np
import parts
import pytest
from conftest import environment, words

import pipelines

# One weight w = 1, loss mean((w x)^2), x = 1, 2, 3, 4: loss 7.5, gradient 15.
REFERENCE = words(
    "--dataset=builders:Reference --model=parts:line --batch_size=12 --optimizer=sgd "
    "--learning_rate=0.01 --train_steps=1 --log_steps=1 --mode=train --callback=parts:probe"
)
# flags -> (loss, weight after one step).
SINGLE_STEPS = {
    "": (7.5, 0.85),
    "--loss=mse": (7.5, 0.85),
    "--l2=1": (8.5, 0.83),
    "--model=parts:line_l2 --grad_accum_steps=2": (8.5, 0.83),
    "--grad_accum_steps=3": (7.5, 0.85),
    "--grad_clip_norm=3": (7.5, 0.97),
    "--grad_clip_norm_per_variable=1.5": (7.5, 0.985),
    "--grad_clip_value=5": (7.5, 0.95),
    "--weight_decay=0.1": (7.5, 0.849),
    "--jit_compile=true": (7.5, 0.85),
    "--optimizer=parts:plain_sgd": (7.5, 0.85),
}
MORE_SINGLE_STEPS = {
    "--loss=parts:squared": (7.5, 0.85),
    "--loss=MeanSquaredError": (7.5, 0.85),
    "--model=parts:line_l2": (8.5, 0.83),
    "--regularizer=parts:weight_squared": (8.5, 0.83),
    "--grad_clip_norm=30": (7.5, 0.85),
    "--learning_rate=0": (7.5, 1),
    "--momentum=0.9": (7.5, 0.85),
    "--jit_compile=auto": (7.5, 0.85),
}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        *SINGLE_STEPS.items(),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_SINGLE_STEPS.items()),
    ],
)
def test_single_step(command, flags, expected):
    loss, weight = expected
    run = command(*REFERENCE, *words(flags), "--num_devices=2")
    assert run.column("loss") == [pytest.approx(loss, rel=1e-6)]
    np.testing.assert_allclose(parts.PROBE["copies"]["0.kernel"], weight, rtol=1e-6)
    assert parts.PROBE["iterations"] == [1]
    penalised = loss > 7.5
    assert run.column("grad_norm") == [pytest.approx(17 if penalised else 15, rel=1e-6)]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_mixed_precision_scales_once(command, policy, replicas):
    flags = (f"--mixed_precision_policy={policy}", f"--num_devices={replicas}")
    run = command(*REFERENCE, *flags)
    assert run.column("loss") == [pytest.approx(7.5, rel=1e-2)]
    assert run.column("grad_norm") == [pytest.approx(15, rel=1e-2)]
    np.testing.assert_allclose(parts.PROBE["copies"]["0.kernel"], 0.85, rtol=1e-2)
    assert parts.PROBE["copies"]["0.kernel"][0].dtype == np.float32


@pytest.mark.parametrize("replicas", [1, 2])
def test_overflow_on_one_replica_skips_the_step_on_all(command, replicas):
    flags = words(
        "--dataset=builders:Numbered --loss=parts:overflows_once --shuffle=false --train_steps=4 "
        "--mixed_precision_policy=mixed_float16 --learning_rate=1e-4"
    )
    run = command(*REFERENCE, *flags, f"--num_devices={replicas}")
    assert run.column("overflow_steps") == [0, 1, 1, 1]
    assert parts.PROBE["iterations"] == [3]
    for path, values in parts.PROBE["copies"].items():
        for value in values:
            np.testing.assert_array_equal(value, values[0], err_msg=path)
    # Steps 0, 2 and 3 alone.
    expected = command(*REFERENCE, *flags, "--num_devices=1", "--loss=parts:skips_once")
    for name, value in expected.weights().items():
        np.testing.assert_allclose(run.weights()[name], value, rtol=1e-3)


@pytest.mark.parametrize("replicas", [1, 2])
def test_overflow_in_the_forward_pass_changes_nothing(command, replicas):
    flags = words(
        "--dataset=builders:Spiky --model=parts:normed --batch_size=6 --train_steps=5 "
        "--mode=train_and_eval --mixed_precision_policy=mixed_float16 --shuffle=false"
    )
    run = command(*REFERENCE, *flags, f"--num_devices={replicas}")
    assert run.column("overflow_steps") == [0, 1, 1, 1, 1]
    assert "warning: step 2: the loss" in run.err
    for name, value in run.weights().items():
        assert np.isfinite(value).all(), name
    assert np.isfinite(run.rows("eval")[-1]["loss"])


def test_weights_that_are_no_numbers_are_no_matter_of_scale(command):
    flags = words("--mixed_precision_policy=mixed_float16 --callback=parts:spoils_weights")
    run = command(*REFERENCE, *flags, "--train_steps=4", code=1)
    assert "finite" in run.error


def test_loss_that_stays_infinite_is_no_matter_of_scale(command):
    flags = ("--mixed_precision_policy=mixed_float16", "--loss=parts:not_finite")
    run = command(*REFERENCE, *flags, "--train_steps=100", "--log_steps=50", code=1)
    assert "finite" in run.error


@pytest.mark.parametrize("replicas", [1, 2])
def test_sgd_equals_fit(command, data_dir, replicas):
    """Batch norm, L2, no dropout: the same weights from the same batches."""
    settings = {"dataset": "builders:Vectors", "batch_size": 6, "seed": 5}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    flags += words("--model=parts:normed --optimizer=sgd --learning_rate=0.1 --train_steps=5")
    run = command(*flags, "--mode=train", "--callback=parts:probe", f"--num_devices={replicas}")
    config = pipelines.DataConfig(**settings, data_dir=str(data_dir))
    data = pipelines.load_data(config, evaluating=False)
    model = parts.normed(data.spec)
    model.set_weights(parts.PROBE["initial"])
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    batches = data.train.batches().take(5).map(lambda batch: (batch["x"], batch["y"]))
    model.fit(batches, verbose=0)
    ours = [value for _, value in sorted(run.weights().items())]
    assert len(ours) == len(model.variables)
    for variable, value in zip(model.variables, ours, strict=True):
        np.testing.assert_allclose(value, variable.numpy(), atol=1e-5, err_msg=variable.path)


@pytest.mark.parametrize("some", [{"adam", "lion"}, pytest.param(None, marks=pytest.mark.slow)])
def test_every_optimizer_runs_on_two_replicas(command, some):
    offered = command(*REFERENCE, "--optimizer=none_such", code=1).error
    names = re.search(r"choose one of (.*), or module:function", offered)[1].split(", ")
    assert {"adam", "adamw", "sgd", "rmsprop", "adagrad", "lion", "ftrl"} <= set(names)
    for name in some or names:
        flags = (f"--optimizer={name}", "--train_steps=2", "--num_devices=2")
        command(*REFERENCE, *flags, "--jit_compile=false")
        assert parts.PROBE["iterations"] == [2], name
        for path, (first, second) in parts.PROBE["copies"].items():
            np.testing.assert_array_equal(first, second, err_msg=f"{name}: {path}")
        assert parts.PROBE["copies"]["0.kernel"][0] < 1, name


def test_default_cross_device_ops(tmp_path, data_dir):
    """As TensorFlow reduces where it is left to choose: only there do unbuilt optimizers fail."""
    code = f"""
import pipelines, trainer
from trainer import strategy
strategy._cross_device_ops = lambda devices: None
settings = dict(model="parts:normed", train_steps=3, learning_rate=0.01, ema_decay=0.5,
                log_steps=1, export=False, tensorboard=False)
data = pipelines.DataConfig(dataset="builders:Vectors", data_dir={str(data_dir)!r}, batch_size=6)
for devices in (2, 1):
    config = trainer.TrainConfig(
        logical_devices=2, num_devices=devices, model_dir=f"run{{devices}}", **settings)
    print(trainer.run(config, data)["eval"]["loss"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    two, one = (float(line) for line in done.stdout.splitlines()[-2:])
    assert two == pytest.approx(one, rel=1e-4)


def test_weight_decay_leaves_bias_and_norm_alone(command):
    flags = words(
        "--dataset=builders:Vectors --model=parts:normed --loss=parts:nothing --optimizer=adamw "
        "--learning_rate=0.1 --weight_decay=0.5 --regularizer=parts:no_penalty"
    )
    command(*REFERENCE, *flags, "--num_devices=2")
    initial, copies = parts.PROBE["initial"], list(parts.PROBE["copies"].items())
    decayed = []
    for value, (path, (after, _)) in zip(initial, copies, strict=False):
        if value.ndim == 2:
            np.testing.assert_allclose(after, value * (1 - 0.1 * 0.5), rtol=1e-6, err_msg=path)
            decayed.append(path)
        elif "moving" not in path:
            np.testing.assert_array_equal(after, value, err_msg=path)
    assert len(decayed) == 2


def test_class_weights_and_label_smoothing(command, data_dir):
    flags = words(
        "--dataset=builders:Vectors --model=parts:linear --batch_size=30 --learning_rate=0 "
        "--class_weights=1,0.5,3 --label_smoothing=0.1 --shuffle=false"
    )
    run = command(*REFERENCE, *flags, "--num_devices=2")
    config = pipelines.DataConfig(
        dataset="builders:Vectors", data_dir=str(data_dir), batch_size=30, shuffle=False
    )
    batch = next(iter(pipelines.load_data(config).train.batches()))
    logits, labels = parts.PROBE["model"](batch["x"]).numpy(), batch["y"].numpy()
    log_softmax = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    targets = np.eye(3)[labels] * 0.9 + 0.1 / 3
    losses = -(targets * log_softmax).sum(1) * np.array([1, 0.5, 3])[labels]
    assert run.column("loss") == [pytest.approx(losses.mean(), rel=1e-5)]
    assert run.column("accuracy") == [pytest.approx((logits.argmax(1) == labels).mean())]


def test_losses_of_keras_get_the_labels_they_want(command, data_dir):
    flags = words("--dataset=builders:Vectors --model=parts:linear --learning_rate=0")
    entropy = command(*REFERENCE, *flags).column("loss")
    for loss in ("sparse_categorical_crossentropy", "CategoricalCrossentropy"):
        run = command(*REFERENCE, *flags, f"--loss={loss}")
        assert run.column("loss") == pytest.approx(entropy, rel=1e-5)
    # As many examples as classes: labels that are not one-hot would be broadcast.
    flags += words("--batch_size=3 --shuffle=false --loss=mse --num_devices=1")
    run = command(*REFERENCE, *flags)
    config = pipelines.DataConfig(
        dataset="builders:Vectors", data_dir=str(data_dir), batch_size=3, shuffle=False
    )
    batch = next(iter(pipelines.load_data(config).train.batches()))
    errors = np.eye(3)[batch["y"].numpy()] - parts.PROBE["model"](batch["x"]).numpy()
    assert run.column("loss") == [pytest.approx((errors**2).mean(), rel=1e-5)]


def test_what_xla_cannot_compile(command):
    flags = (*REFERENCE, "--dataset=builders:Vectors", "--model=parts:in_numpy", "--num_devices=1")
    run = command(*flags, "--jit_compile=auto")
    assert "jit_compile=auto: not used after all" in run.err and "PyFunc" in run.err
    error = command(*flags, "--jit_compile=true", code=1).error
    assert "--jit_compile=true" in error and "PyFunc" in error


def test_freeze(command):
    flags = words("--dataset=builders:Vectors --model=parts:normed --freeze=hid --learning_rate=1")
    run = command(*REFERENCE, *flags, "--num_devices=2")
    initial, copies = parts.PROBE["initial"], parts.PROBE["copies"]
    np.testing.assert_array_equal(copies["0.kernel"][0], initial[0])
    assert (copies["5.kernel"][0] != initial[5]).any()
    assert "hidden" in run.err  # says what it froze
    assert not any("hidden" in name for name in run.variables() if "optimizers" in name)


def test_average_is_evaluated_and_training_goes_on_from_the_weights(command):
    flags = ("--ema_decay=0.5", "--train_steps=2", "--mode=train_and_eval", "--num_devices=2")
    run = command(*REFERENCE, *flags)
    first, second = 0.85, 0.85**2
    np.testing.assert_allclose(parts.PROBE["copies"]["0.kernel"], second, rtol=1e-6)
    row = run.rows("eval")[-1]
    assert row["step"] == 2 and row["weights"] == "average"
    assert row["loss"] == pytest.approx(7.5 * ((first + second) / 2) ** 2, rel=1e-5)


# rate at step s of 12, of which 3 warm up, from a peak of 0.4.
SCHEDULES = {
    "constant": lambda s: 0.4,
    "cosine": lambda s: 0.2 * (1 + np.cos(np.pi * (s - 3) / 9)),
    "linear": lambda s: 0.4 * (1 - (s - 3) / 9),
    "piecewise": lambda s: 0.4 * 0.1 ** sum(s > edge for edge in (5, 9)),
    "exponential": lambda s: 0.4 * 0.5 ** ((s - 3) / 4),
    "parts:rising": lambda s: 0.4 * (s - 3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(command, name):
    more = {
        "piecewise": ("--lr_boundaries=5,9",),
        "exponential": ("--lr_decay_steps=4", "--lr_decay_rate=0.5"),
    }
    flags = words("--learning_rate=0.4 --warmup_steps=3 --train_steps=12 --loss=parts:nothing")
    run = command(
        *REFERENCE, *flags, f"--lr_schedule={name}", *more.get(name, ()), "--num_devices=2"
    )
    expected = [0.4 * s / 3 if s < 3 else SCHEDULES[name](s) for s in range(12)]
    assert run.column("learning_rate") == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_user_code_sees_the_step_and_the_model(command):
    run = command(
        *REFERENCE, "--loss=parts:step_and_weight", "--train_steps=3", "--learning_rate=0"
    )
    assert run.column("loss") == [1, 2, 3]  # step + w, w = 1


def test_labels_of_any_rank_train_without_a_shape_argument(command):
    """[batch] labels against [batch, 1] outputs must not broadcast to [batch, batch]."""
    for loss in ("huber", "binary_crossentropy"):
        run = command(*REFERENCE, f"--loss={loss}", "--train_steps=1")
        assert np.isfinite(run.column("loss")).all()
    assert command(*REFERENCE, "--loss=mae").column("loss") == [pytest.approx(2.5)]
