"""python -m trainer.main as a user meets it: defaults, modes, flag files, when it stops."""

import os
import pathlib
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
from conftest import ROOT, Run, environment, words

import pipelines
from pipelines import UserError, cli

RUN = words(
    "--dataset=builders:Vectors --model=parts:normed --batch_size=6 --learning_rate=0.05 "
    "--train_steps=10 --log_steps=5 --eval_steps=5 --num_devices=1"
)
# Prepared datasets too large for the repository.
SHARED_DATA = pathlib.Path(
    os.environ.get("TRAINER_TEST_DATA", ROOT.parent / "shared" / "data" / "tfds")
)


def test_no_flags_at_all(tmp_path):
    """Trains on the embedded dataset, evaluates, says how good and how fast, and where."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "trainer.main"],
        cwd=tmp_path,
        env=environment(TFDS_DATA_DIR=str(tmp_path / "data")),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    run = Run(folder)
    assert run.result["eval"]["accuracy"] >= 0.94
    assert run.result["eval"]["examples"] == 1000
    assert run.result["epochs"] == 5
    assert run.result["dataset"]["train_examples"] == 4000
    assert run.result["startup_secs"] + run.result["train_secs"] < time.monotonic() - started
    (summary,) = [line for line in done.stdout.splitlines() if "results in" in line]
    for part in ("accuracy 0.9", "1000 examples", "examples/s", f"runs/{folder.name}"):
        assert part in summary
    files = {"flags.txt", "metrics.jsonl", "result.json", "checkpoints", "best", "tensorboard"}
    assert files | {"export"} <= {path.name for path in folder.iterdir()}
    assert {path.name for path in (folder / "export").iterdir()} == {"model.keras", "saved_model"}


def test_flags_txt_repeats_the_run(command):
    flags = words("--augment=parts:numpy_noise --lr_schedule=cosine --warmup_steps=2 --seed=7")
    first = command(*RUN, *flags)
    again = command(f"--flagfile={first.dir}/flags.txt", model_dir=command.new_folder())
    # Its own --model_dir is in the file: what comes later on the command line wins.
    assert f"resumed at step {10}" in again.err
    third_dir = command.new_folder()
    third = command(f"--flagfile={first.dir}/flags.txt", f"--model_dir={third_dir}")
    third.dir = third_dir
    assert "resumed" not in third.err
    assert third.result["steps"] == 10
    for name, value in first.variables().items():
        np.testing.assert_array_equal(third.variables()[name], value, err_msg=name)


def test_flags_txt_of_a_run_serves_the_commands_for_its_input(command):
    run = command(*RUN, "--seed=7")
    argv = ["preview", f"--flagfile={run.dir}/flags.txt"]
    config = pipelines.config_from_flags(cli.parse_flags(argv, "doc", pipelines.define_flags))
    assert (config.dataset, config.batch_size, config.seed) == ("builders:Vectors", 6, 7)
    with pytest.raises(UserError, match="modell"):
        cli.parse_flags([*argv, "--modell=mlp"], "doc", pipelines.define_flags)


def test_eval_reads_the_newest_checkpoint(command):
    trained = command(*(flag for flag in RUN if "eval" not in flag), "--mode=train")
    assert trained.rows("eval") == [] and trained.result["eval"] is None
    flags = (*RUN, "--mode=eval", "--num_devices=2")
    first = command(*flags, model_dir=trained.dir)
    result = first.result
    assert result["steps"] == 10
    assert first.column("step", "eval") == [10]
    assert f"accuracy {result['eval']['accuracy']:.4f} on 11 examples" in first.out
    command(*flags, model_dir=trained.dir)
    assert first.column("step", "eval") == [10]
    on_train = command(*flags, "--eval_split=train", model_dir=trained.dir)
    assert on_train.result["eval"]["examples"] == 31
    # The same numbers as evaluating right after training.
    both = command(*RUN).rows("eval")[-1]
    assert both["loss"] == pytest.approx(result["eval"]["loss"], rel=1e-5)


@pytest.mark.parametrize("flags", ["--ema_decay=0.8", "--task=parts:Centred"])
def test_eval_and_export_use_what_training_ended_with(command, flags):
    flags = (*RUN, *words(flags), "--export=true", "--num_devices=2")
    run = command(*flags)
    exported = keras.saving.load_model(run.dir / "export" / "model.keras").get_weights()
    (*_, at_end) = run.rows("eval")
    command(*flags, "--mode=eval", model_dir=run.dir)
    (*_, alone) = run.rows("eval")
    assert {**alone, "seconds": 0} == {**at_end, "seconds": 0}
    command(*flags, "--mode=export", model_dir=run.dir)
    again = keras.saving.load_model(run.dir / "export" / "model.keras").get_weights()
    for first, second in zip(exported, again, strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_model_that_keras_cannot_save(command):
    run = command(*RUN, "--model=parts:subclassed", "--export=true")
    assert "warning: export/ will hold saved_model alone, no model.keras" in run.err
    assert [path.name for path in (run.dir / "export").iterdir()] == ["saved_model"]


def test_the_averages_of_another_optimizer_are_refused(command):
    run = command(*RUN, "--ema_decay=0.8")
    flags = ("--ema_decay=0.8", "--optimizer=sgd", "--mode=eval")
    assert "--optimizer" in command(*RUN, *flags, model_dir=run.dir, code=1).error


def test_an_evaluation_on_other_data_takes_no_ones_place(command):
    run = command(*RUN)
    before = run.rows("eval")
    command(*RUN, "--mode=eval", "--eval_split=train[:7]", model_dir=run.dir)
    (*kept, new) = run.rows("eval")
    assert kept == before and new["examples"] == 7 and new["data"].endswith("split train[:7]")
    assert run.result["epochs"] == 2 and run.result["dataset"]["train_examples"] == 31


def test_early_stopping(command):
    flags = words("--learning_rate=0 --early_stopping_patience=2 --train_steps=1000 --freeze=norm")
    run = command(*RUN, *flags)
    # Nothing changes after the first evaluation: two without gain follow.
    assert run.column("step", "eval") == [5, 10, 15]
    assert run.result["steps"] == 15 and run.result["finished"]
    assert "2 evaluations" in run.result["stop_reason"]
    again = command(*RUN, *flags, model_dir=run.dir)
    assert again.result["steps"] == 15


@pytest.mark.parametrize("target", ["accuracy>=0", "loss<=100"])
def test_target_metric(command, target):
    run = command(*RUN, f"--target_metric={target}", "--train_steps=1000", "--log_steps=3")
    assert run.result["steps"] == 5
    assert run.column("step") == [3, 5]  # the last row of a run that stops early is there
    assert target in run.result["stop_reason"]
    # Judged anew by other flags.
    flags = (*RUN, "--train_steps=1000", "--log_steps=3")
    again = command(*flags, f"--target_metric={target}", model_dir=run.dir)
    assert again.result["steps"] == 5 and "nothing to train" in again.err
    other = command(*flags, "--target_metric=loss<=0", "--eval_steps=500", model_dir=run.dir)
    assert other.result["steps"] == 1000
    missed = command(*RUN, "--target_metric=loss<=0")
    assert missed.result["steps"] == 10 and missed.result["stop_reason"] is None


def test_epochs_and_steps(command):
    flags = [flag for flag in RUN if "steps" not in flag]
    run = command(*flags, "--train_epochs=2")
    assert run.result["steps"] == 10 and run.result["epochs"] == 2
    assert run.column("step", "eval") == [5, 10]  # once an epoch
    run = command(*flags, "--train_epochs=4", "--eval_epochs=3", "--drop_remainder=false")
    assert run.result["steps"] == 24
    assert run.column("step", "eval") == [18, 24]


def test_summary_prints_the_layers(command):
    out = command(*RUN, "--summary").out
    assert "hidden" in out and "norm" in out


def test_held_out_evaluation_is_logged(command):
    run = command(*RUN, "--dataset=builders:TrainOnly")
    assert run.result["dataset"]["train_examples"] == 18
    assert run.result["eval"]["examples"] == 2
    assert "last 2 examples of train" in run.err


def test_overlapping_splits_are_warned_of(command):
    run = command(*RUN, "--eval_split=train[50%:]")
    (warning,) = [line for line in run.err.splitlines() if line.startswith("warning: ")]
    assert "15 examples are in both" in warning or "16 examples are in both" in warning


def test_examples_named_twice_are_warned_of(command):
    run = command(*RUN, "--train_split=train[:20]+train[15:]")
    assert "warning: --train_split=train[:20]+train[15:]: 5 of its examples come twice" in run.err


def test_dataset_by_folder(command, data_dir):
    by_name = command(*RUN)
    by_folder = command(*RUN, f"--dataset={data_dir}/vectors/1.0.0", "--data_dir=/nowhere")
    assert by_folder.column("loss") == by_name.column("loss")
    assert not os.path.exists("/nowhere")


def test_paths_with_spaces_and_other_letters(command, tmp_path):
    run = command(*RUN, "--tensorboard=true", "--export=true", model_dir=tmp_path / "ein Läuf 1")
    assert run.result["steps"] == 10
    assert command(*RUN, model_dir=run.dir).result["steps"] == 10


def test_everything_that_can_be_flagged_once(command):
    """Rarely used flags together: all are honoured, on three replicas."""
    flags = words(
        "--optimizer=adamw --weight_decay=0.01 --grad_clip_norm=1 --grad_accum_steps=2 "
        "--ema_decay=0.9 --label_smoothing=0.1 --class_weights=1,2,1 --l2=0.001 "
        "--lr_schedule=exponential --warmup_steps=2 --metrics=parts:class_number "
        "--mixed_precision_policy=mixed_bfloat16 --num_parallel_calls=2 --prefetch_batches=2 "
        "--eval_batch_size=4 --steps_per_loop=3 --profile_steps=2,3 --tensorboard=true "
        "--best_metric=class_number --checkpoint_secs=100 --num_devices=3"
    )
    run = command(*RUN, *flags)
    assert run.result["steps"] == 10 and run.result["replicas"] == 3
    assert list((run.dir / "tensorboard").rglob("*.xplane.pb"))


def test_op_determinism(command):
    flags = [*RUN, "--deterministic=true", "--logical_devices=2", "--num_devices=2"]
    run, process = command.start(*flags)
    assert process.wait(300) == 0, process.communicate()[1]
    assert run.result["steps"] == 10


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED_DATA / "fashion_mnist").exists(), reason="TRAINER_TEST_DATA")
@pytest.mark.parametrize(
    ("flags", "accuracy"),
    [
        ("--model=cnn --train_epochs=3", 0.89),
        (
            "--model=mlp --hidden_units=10 --batch_size=32 --train_epochs=2 --learning_rate=0.001",
            0.82,
        ),
    ],
)
def test_fashion_mnist(command, flags, accuracy):
    run = command.process(
        "--dataset=fashion_mnist", f"--data_dir={SHARED_DATA}", "--jit_compile=auto", *words(flags)
    )
    assert run.result["eval"]["examples"] == 10_000
    assert run.result["eval"]["accuracy"] >= accuracy
