"""Law 5: nothing is silent. Each mistake is told in one line, soon, and leaves nothing behind."""

import functools
import shutil
import time
import types

import numpy as np
import parts
import pytest
from conftest import Run, finish, words

import pipelines
import trainer
from pipelines import UserError

BASE = words(
    "--dataset=builders:Vectors --model=parts:linear --batch_size=4 --train_steps=1 --num_devices=1"
)

# name -> (flags, what the line must say). Later flags replace those of BASE.
MISTAKES = {
    # Flags.
    "unknown_flag": ("--no_such_flag=1", "no_such_flag"),
    "misspelt_flag": ("--learning_rte=1", "learning_rte learning_rate"),
    "leftover_argument": ("train", "'train' --flag=value"),
    "not_a_number": ("--batch_size=many", "batch_size many"),
    "not_a_boolean": ("--export=perhaps", "export perhaps"),
    "zero_batch": ("--batch_size=0", "batch_size 0"),
    "zero_eval_batch": ("--eval_batch_size=0", "eval_batch_size 0"),
    "zero_steps": ("--train_steps=0", "train_steps 0"),
    "negative_seed": ("--seed=-1", "seed -1"),
    "negative_rate": ("--learning_rate=-0.1", "learning_rate -0.1"),
    "rate_not_a_number": ("--learning_rate=nan", "learning_rate nan"),
    "infinite_rate": ("--learning_rate=inf", "learning_rate inf"),
    "infinite_l2": ("--l2=inf", "l2 inf"),
    "negative_warmup": ("--warmup_steps=-1", "warmup_steps -1"),
    "zero_clip": ("--grad_clip_norm=0", "grad_clip_norm 0"),
    "keep_none": ("--max_to_keep=0", "max_to_keep 0"),
    "unknown_mode": ("--mode=tran", "mode tran train_and_eval"),
    "unknown_strategy": ("--strategy=tpu", "strategy tpu mirrored"),
    "unknown_policy": ("--mixed_precision_policy=int8", "mixed_precision_policy int8 float32"),
    "missing_flagfile": ("--flagfile=/no/such/file", "/no/such/file"),
    "binary_flagfile": ("--flagfile={binary_file}", "flagfile"),
    "durations": ("--train_epochs=2", "--train_epochs --train_steps"),
    "eval_durations": ("--eval_epochs=2 --eval_steps=3", "--eval_epochs --eval_steps"),
    "profile_order": ("--profile_steps=5,2", "--profile_steps"),
    "profile_one": ("--profile_steps=5", "--profile_steps"),
    "profile_beyond_the_end": ("--profile_steps=5,9", "--profile_steps=5,9 1"),
    "useless_penalty_weight": ("--gan_penalty_weight=2", "--gan_penalty_weight --task=gan"),
    "useless_hidden_units": ("--model=resnet20 --hidden_units=8", "--hidden_units mlp"),
    "useless_boundaries": ("--lr_boundaries=3", "--lr_boundaries piecewise"),
    "useless_patience": ("--mode=train --early_stopping_patience=2", "early_stopping_patience"),
    "bad_target": ("--target_metric=accuracy>0.9", "--target_metric accuracy>0.9 name>=value"),
    "unknown_target": ("--target_metric=f1>=0.9", "--target_metric f1 accuracy"),
    "unknown_best_metric": ("--best_metric=f1", "--best_metric f1 accuracy"),
    # Devices.
    "too_many_devices": ("--num_devices=7", "--num_devices=7 CPU:0 CPU:2"),
    "one_device_of_two": ("--strategy=one_device --num_devices=2", "one_device --num_devices=2"),
    "uneven_batch": ("--batch_size=5 --num_devices=2", "5 2 replicas"),
    "uneven_parts": ("--batch_size=4 --grad_accum_steps=3", "4 3 accumulation"),
    "jit_across_replicas": (
        "--model=parts:normed --jit_compile=true --num_devices=2",
        "--jit_compile=true batch normalization 2 replicas",
    ),
    # Data.
    "unknown_dataset": ("--dataset=no_such_dataset", "no_such_dataset mnist_5k"),
    "empty_dataset": ("--dataset=", "--dataset"),
    "unknown_version": ("--dataset=mnist_5k:9.9.9", "mnist_5k 9.9.9"),
    "unknown_module": ("--dataset=no_such_module:Builder", "--dataset no_such_module"),
    "unknown_builder": ("--dataset=builders:NoSuch", "builders NoSuch Vectors"),
    "not_a_builder": ("--dataset=builders:not_a_builder", "not_a_builder"),
    "failing_builder": ("--dataset=builders:Failing", "failing broken"),
    "not_prepared": ("--download=false --data_dir={empty}", "vectors {empty} --download=false"),
    "not_a_dataset_folder": ("--dataset={empty}", "{empty} dataset_info.json"),
    "data_dir_is_a_file": ("--data_dir={file}", "{file}"),
    "empty_data_dir": ("--data_dir=", "--data_dir"),
    "unknown_split": ("--train_split=trian", "--train_split trian train 31 test 11"),
    "unknown_eval_split": ("--eval_split=validation", "--eval_split validation test 11"),
    "no_percent": ("--train_split=train[:1%]", "--train_split train[:1%]"),
    "backwards_slice": ("--train_split=train[5:3]", "--train_split train[5:3]"),
    "slice_beyond_the_end": ("--train_split=train[:100]", "--train_split train[:100] 31"),
    "bad_slice": ("--train_split=train[a:]", "--train_split train[a:]"),
    "empty_split": ("--eval_split=test[11:]", "--eval_split test[11:]"),
    "empty_in_the_source": ("--dataset=builders:EmptyTest", "empty_test test"),
    "one_example": ("--dataset=builders:OneExample --batch_size=1", "1 example --eval_split"),
    "batch_beyond_the_split": ("--batch_size=64", "--batch_size=64 31 examples"),
    "unlabelled": ("--dataset=builders:UnlabelledTest", "test 'y' 0..2 -1"),
    "too_few_classes": ("--dataset=builders:Ids --num_classes=4", "'id' 0..3"),
    "target_not_finite": ("--dataset=builders:NotFiniteTargets", "train 'y' nan"),
    "text": ("--dataset=builders:Words", "'text' label"),
    "ragged": ("--dataset=builders:Ragged", "'x'"),
    "four_channels": ("--dataset=builders:FourChannels", "'image' 4 channels"),
    "no_keys": ("--dataset=builders:NoKeys", "--input_key a b"),
    "unknown_input": ("--input_key=pixels", "--input_key pixels x y"),
    "unknown_label": ("--label_key=target", "--label_key target x y"),
    "same_keys": ("--input_key=y --label_key=y", "--input_key --label_key 'y'"),
    "unknown_augmentation": ("--augment=flop", "--augment flop flip crop"),
    "flipped_vectors": ("--augment=flip", "--augment flip 'x' (4,)"),
    "augmentation_of_nothing": ("--augment=parts:no_such", "--augment parts no_such draw"),
    "augmentation_of_type": ("--augment=parts:other_type", "other_type 'y' float32 int64"),
    "augmentation_of_shape": ("--augment=parts:other_shape", "other_shape 'x'"),
    "forgetful_augmentation": ("--augment=parts:forgets_entries", "forgets_entries"),
    # Model, loss, optimizer.
    "unknown_model": ("--model=no_such_model", "--model no_such_model mlp cnn"),
    "empty_model": ("--model=", "--model"),
    "model_of_no_module": ("--model=no_such_module:model", "--model no_such_module"),
    "model_of_no_name": ("--model=parts:no_such", "--model parts no_such linear"),
    "not_a_model": ("--model=parts:not_a_model", "--model not_a_model str keras.Model"),
    "broken_model": ("--model=parts:broken_model", "broken_model ValueError no such layer"),
    "wrong_output": ("--model=parts:two_outputs", "two_outputs (2,) (3,)"),
    "images_only": ("--model=resnet20", "--model=resnet20 (4,)"),
    "two_heads": ("--model=parts:two_heads", "two_heads"),
    "named_outputs": ("--model=parts:named_outputs", "named_outputs"),
    "wrong_input": ("--model=parts:wrong_input", "7 4"),
    "unknown_loss": ("--loss=hinge_of_a_door", "--loss hinge_of_a_door hinge"),
    "loss_of_a_batch": ("--loss=dice", "--loss=dice one loss per example"),
    "loss_of_sequences": ("--loss=ctc", "--loss=ctc (4, 3)"),
    "mean_loss": ("--loss=parts:mean_squared", "--loss mean_squared example"),
    "broken_loss": ("--loss=parts:broken_loss", "ValueError no such term"),
    "unknown_metric": ("--metrics=accuracy", "--metrics accuracy"),
    "mean_metric": ("--metrics=parts:mean_error", "mean_error example"),
    "metric_of_a_fields_name": ("--metrics=parts:step", "--metrics 'step'"),
    "metric_twice": ("--metrics=parts:accuracy", "--metrics=parts:accuracy 'accuracy' already"),
    "many_penalties": ("--regularizer=parts:penalties", "--regularizer penalties scalar"),
    "unknown_regularizer": ("--regularizer=parts:no_such", "--regularizer no_such"),
    "unknown_callback": ("--callback=no_such_module:fn", "--callback no_such_module"),
    "unknown_task": ("--task=segmentation", "--task segmentation classification regression"),
    "failing_task": ("--task=parts:FailsToBuild", "FailsToBuild ValueError no such part here"),
    "not_a_task": ("--task=parts:squared", "--task parts:squared trainer.Task"),
    "classes_of_a_number": ("--dataset=builders:Line --task=classification", "classification 'y'"),
    "weights_of_two_classes": ("--class_weights=1,2", "--class_weights 2 3"),
    "weights_not_numbers": ("--class_weights=a,b,c", "--class_weights a,b,c"),
    "negative_weights": ("--class_weights=1,-2,1", "--class_weights -2"),
    "smoothed_numbers": ("--dataset=builders:Line --label_smoothing=0.1", "--label_smoothing"),
    "smoothed_too_much": ("--label_smoothing=2", "label_smoothing 2"),
    "frozen_nothing": ("--freeze=convolution", "--freeze convolution out"),
    "frozen_everything": ("--freeze=.", "trainable"),
    "bad_expression": ("--freeze=(", "--freeze regular expression"),
    "unknown_optimizer": ("--optimizer=adamm", "--optimizer adamm adam sgd"),
    "not_an_optimizer": ("--optimizer=parts:not_an_optimizer", "not_an_optimizer str"),
    "momentum_of_adam": ("--momentum=0.9", "--momentum adam"),
    "unknown_schedule": ("--lr_schedule=cosin", "--lr_schedule cosin cosine"),
    "not_a_schedule": ("--lr_schedule=parts:not_a_schedule", "not_a_schedule"),
    "warmup_only": ("--warmup_steps=1", "--warmup_steps=1 1 steps"),
    "boundaries_not_numbers": ("--lr_schedule=piecewise --lr_boundaries=a", "--lr_boundaries a"),
    "boundaries_backwards": (
        "--lr_schedule=piecewise --lr_boundaries=5,3",
        "--lr_boundaries 5,3",
    ),
    "missing_init": ("--init_from=/no/such/model.keras", "--init_from /no/such/model.keras"),
    "init_and_resume": ("--init_from=x --resume=must", "--init_from --resume"),
    # The run's folder.
    "dir_is_a_file": ("--model_dir={file}", "--model_dir {file}"),
    "dir_in_a_file": ("--model_dir={file}/run", "--model_dir {file}"),
    "dir_not_writable": ("--model_dir=/proc/run", "--model_dir /proc/run"),
    "nothing_to_resume": ("--resume=must", "--model_dir checkpoint"),
    "nothing_to_evaluate": ("--mode=eval", "--model_dir"),
    "nothing_to_export": ("--mode=export", "--model_dir"),
    "evaluating_nowhere": ("--mode=eval --model_dir=", "--mode=eval --model_dir"),
}


@pytest.fixture
def places(tmp_path):
    """Paths that the mistakes speak of."""
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "binary_file").write_bytes(b"\xff\xfe\x00--train_steps=1")
    (tmp_path / "empty").mkdir()
    return {name: str(tmp_path / name) for name in ("file", "binary_file", "empty")}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_told_in_one_line(command, places, monkeypatch, name):
    flags, said = (text.format(**places) for text in MISTAKES[name])
    monkeypatch.chdir(places["empty"])
    started = time.process_time()  # not of whatever else this machine does
    run = command(*BASE, *words(flags), code=1)
    assert time.process_time() - started < 15
    assert_one_line(run, said)
    assert not run.dir.exists(), [p.name for p in run.dir.iterdir()]
    assert not any(p for p in run.dir.parent.joinpath("empty").iterdir() if p.name == "runs")


def assert_one_line(run, said):
    assert run.error.startswith("error: "), run.err
    assert "Traceback" not in run.err and 'File "' not in run.err
    for word in words(said):
        assert word in run.error, f"{word!r} is not in: {run.error}"


def test_at_least_forty_mistakes():
    assert len(MISTAKES) >= 40


def test_ready_made_models_are_refused(command, monkeypatch):
    spec = types.SimpleNamespace(input_shape=(4,), num_classes=3)
    monkeypatch.setitem(parts.READY_MADE, "model", parts.linear(spec))
    run = command(*BASE, "--model=parts:ready_made", "--num_devices=2", code=1)
    assert_one_line(run, "scope build()")


# The same through real processes: exit codes, the last line of stderr, other environments.

PROCESSES = {
    "unknown_flag": ("--no_such_flag=1", "no_such_flag", {}),
    "wrong_output": ("--model=parts:two_outputs", "(2,) (3,)", {}),
    "another_backend": ("", "jax KERAS_BACKEND tensorflow", {"KERAS_BACKEND": "jax"}),
}


def test_processes_end_with_one_line(command):
    started = {}
    for name, (flags, said, env) in PROCESSES.items():
        started[name] = (said, command.start(*BASE, *words(flags), env=env))
    for said, pair in started.values():
        run = finish(*pair, code=1)
        assert_one_line(run, said)
        assert not run.dir.exists()


def test_defaults_of_the_keras_file_change_nothing(command, tmp_path):
    (tmp_path / "keras.json").write_text(
        '{"backend": "torch", "floatx": "float64", "image_data_format": "channels_first"}'
    )
    flags = [*BASE, "--dataset=builders:Images", "--model=parts:conv", "--train_steps=2"]
    other = command.process(*flags, env={"KERAS_HOME": str(tmp_path)})
    plain = command(*flags)
    assert plain.weights().keys() == other.weights().keys()
    for name, value in plain.weights().items():
        assert value.tobytes() == other.weights()[name].tobytes()


def test_help_names_every_flag_and_exits_0(command):
    run = command("--help")
    for flag in ("--batch_size", "--strategy", "--optimizer", "--model_dir", "--flagfile"):
        assert flag in run.out


# Folders that hold something.


@pytest.fixture(scope="module")
def trained(module_command):
    return module_command(*BASE, "--train_steps=4", "--checkpoint_steps=2", "--mode=train")


CHANGES = {
    "model": "parts:normed",
    "optimizer": "sgd",
    "batch_size": "8",
    "seed": "5",
    "lr_schedule": "cosine",
    "mixed_precision_policy": "mixed_bfloat16",
    "shuffle": "false",
    "drop_remainder": "false",
    "loss": "categorical_hinge",
    "l2": "0.1",
    "train_split": "train[:20]",
    "grad_clip_norm": "1",
    "ema_decay": "0.9",
    "weight_decay": "0.1",
    "label_smoothing": "0.1",
    "dataset": "builders:Many",
    "reader": "stream",
    "metrics": "parts:class_number",
}


@pytest.mark.parametrize("flag", CHANGES)
def test_changes_of_meaning_are_refused_at_resume(command, trained, flag):
    run = command.copy_of(trained)
    before = contents(run.dir)
    flags = (*BASE, "--train_steps=6", "--mode=train", f"--{flag}={CHANGES[flag]}")
    run = command(*flags, model_dir=run.dir, code=1)
    assert_one_line(run, f"--{flag}")
    assert contents(run.dir) == before


@pytest.mark.parametrize(
    "flags",
    ["--learning_rate=0.5", "--strategy=one_device", "--num_devices=2", "--log_steps=1"],
)
def test_what_keeps_the_meaning_may_change_at_resume(command, trained, flags):
    run = command.copy_of(trained)
    run = command(*BASE, "--train_steps=6", "--mode=train", *words(flags), model_dir=run.dir)
    assert "resumed at step 4" in run.err
    assert run.result["steps"] == 6
    if "learning_rate" in flags:
        assert run.column("learning_rate")[-1] == pytest.approx(0.5)


def test_a_rate_of_the_optimizers_own_survives_a_resume(command):
    flags = [*BASE, *words("--mode=train --optimizer=parts:slow_sgd --learning_rate=0.5")]
    whole = command(*flags, "--train_steps=6")
    parted = command(*flags, "--train_steps=4")
    command(*flags, "--train_steps=6", model_dir=parted.dir)
    for name, value in whole.variables().items():
        np.testing.assert_array_equal(parted.variables()[name], value, err_msg=name)
    command(*flags, "--train_steps=7", "--learning_rate=1", model_dir=parted.dir)
    assert parted.column("learning_rate")[-1] == pytest.approx(0.01)


def test_what_was_held_out_stays_out_at_resume(command):
    flags = [*BASE, "--dataset=builders:TrainOnly", "--batch_size=6"]
    run = command(*flags, "--train_steps=2")
    for change in ("--mode=train", "--eval_split=train[:4]"):
        error = command(*flags, "--train_steps=4", change, model_dir=run.dir, code=1)
        assert_one_line(error, "--eval_split 18 20")


@pytest.mark.parametrize(
    ("train", "data", "told"),
    [
        ({"train_steps": 0}, {}, "--train_steps=0"),
        ({"train_epochs": -1}, {}, "--train_epochs=-1"),
        ({"strategy": "two_devices"}, {}, "--strategy=two_devices one_device mirrored"),
        ({"log_steps": 0}, {}, "--log_steps=0"),
        ({"label_smoothing": 1.5}, {}, "--label_smoothing=1.5"),
        ({}, {"batch_size": 0}, "--batch_size=0"),
        ({}, {"reader": "disk"}, "--reader=disk memory indexed stream"),
        ({}, {"on_bad_record": "ignore"}, "--on_bad_record=ignore fail skip"),
    ],
)
def test_values_from_python_are_checked_as_those_of_flags(tmp_path, train, data, told):
    config = trainer.TrainConfig(model_dir=str(tmp_path / "run"), **train)
    with pytest.raises(UserError) as caught:
        trainer.run(config, pipelines.DataConfig(**data))
    assert all(word in str(caught.value) for word in told.split())
    assert not (tmp_path / "run").exists()


def contents(folder):
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_never_means_never(command, trained):
    run = command.copy_of(trained)
    before = contents(run.dir)
    assert_one_line(
        command(*BASE, "--resume=never", model_dir=run.dir, code=1), f"--resume {run.dir} 4"
    )
    assert contents(run.dir) == before


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_foreign_checkpoints_are_left_alone(command, trained, mode):
    folder = command.new_folder()
    (folder / "checkpoints").mkdir(parents=True)
    for path in (trained.dir / "checkpoints").glob("ckpt-4.*"):
        if path.suffix != ".json":
            shutil.copy(path, folder / "checkpoints" / path.name)
    before = contents(folder)
    assert_one_line(command(*BASE, f"--mode={mode}", model_dir=folder, code=1), str(folder))
    assert contents(folder) == before


def test_corrupt_folders(command):
    for name in ("checkpoints", "metrics.jsonl", "flags.txt"):
        folder = command.new_folder()
        folder.mkdir()
        if name == "checkpoints":
            (folder / name).write_text("a file where a folder should be")
        else:
            (folder / name).mkdir()
        assert_one_line(command(*BASE, model_dir=folder, code=1), str(folder))


def truncate(shard):
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def flip_bits(shard):
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x55
    shard.write_bytes(content)


def remove(shard):
    shard.unlink()


def garble_metadata(shard):
    (shard.parent / "dataset_info.json").write_text("{")


@pytest.mark.parametrize("damage", [truncate, flip_bits, remove, garble_metadata])
def test_corrupt_prepared_data(command, trained, data_dir, tmp_path, damage):
    shutil.copytree(data_dir / "vectors", tmp_path / "vectors")
    (shard,) = (tmp_path / "vectors").rglob("*train.tfrecord*")
    damage(shard)
    run = command(*BASE, f"--data_dir={tmp_path}", "--download=false", code=1)
    assert_one_line(run, str(tmp_path))


def test_loss_that_is_not_finite_stops_the_run(command):
    flags = words("--loss=parts:not_finite --train_steps=20 --log_steps=2 --mode=train")
    for replicas in (1, 2):
        run = command(*BASE, *flags, f"--num_devices={replicas}", code=1)
        assert_one_line(run, "step 5 finite")
        assert not (run.dir / "result.json").exists()
        assert run.column("step") == [2, 4]


def test_rollback_goes_on_in_another_order(command):
    flags = words(
        "--loss=parts:not_finite_once --train_steps=12 --checkpoint_steps=2 --mode=train "
        "--on_nan=rollback --jit_compile=false --log_steps=1"
    )
    run = command(*BASE, *flags)
    assert run.result["steps"] == 12
    assert run.column("step") == list(range(1, 13))
    assert "warning: " in run.err and "rolling back to step" in run.err


def test_second_run_in_a_folder_refuses(command):
    flags = [*BASE, "--mode=train"]
    run, process = command.start(*flags, "--train_steps=1000000", "--log_steps=50")
    while process.poll() is None and not (run.dir / "metrics.jsonl").exists():
        time.sleep(0.05)
    try:
        second = command(*flags, model_dir=run.dir, code=1)
        assert_one_line(second, f"{run.dir} {process.pid}")
    finally:
        process.kill()
        process.communicate()
    # The lock dies with its owner.
    steps = str(Run(run.dir).column("step")[-1])
    command(*flags, f"--train_steps={steps}", "--log_steps=50", model_dir=run.dir)


# Settings made in Python.


def test_settings_of_other_types_are_refused_where_they_are_made():
    for make, fields, told in (
        (pipelines.DataConfig, {"batch_size": "6"}, "--batch_size='6': must be an integer"),
        (pipelines.DataConfig, {"batch_size": None}, "--batch_size=None: must be an integer"),
        (pipelines.DataConfig, {"batch_size": True}, "--batch_size=True: must be an integer"),
        (pipelines.DataConfig, {"augment": "flip"}, "--augment='flip': must be a tuple"),
        (trainer.TrainConfig, {"hidden_units": 16}, "--hidden_units=16: must be a tuple"),
        (trainer.TrainConfig, {"class_weights": {0: 1.0, 1: 2.0, 2: 1.0}}, "--class_weights={0"),
        (trainer.TrainConfig, {"class_weights": "1,2,3"}, "--class_weights='1,2,3'"),
        (trainer.TrainConfig, {"model": None}, "--model=None: must be a string, or"),
        (trainer.TrainConfig, {"learning_rate": "fast"}, "'fast': must be a number, or None"),
    ):
        with pytest.raises(UserError) as raised:
            make(**fields)
        assert told in str(raised.value)


def test_numbers_of_numpy_lists_and_paths_are_as_good(data_dir, tmp_path):
    data = pipelines.DataConfig(
        dataset="builders:Vectors", data_dir=data_dir, batch_size=np.int64(6), seed=np.int32(3)
    )
    config = trainer.TrainConfig(
        model_dir=tmp_path / "run",
        model=functools.partial(parts.linear),
        learning_rate=np.float32(0.1),
        train_steps=np.int64(2),
        class_weights=[1, 2, np.float64(3)],
        seed=data.seed,
        num_devices=1,
        export=False,
    )
    assert trainer.run(config, data)["steps"] == 2
    assert config.class_weights == (1, 2, 3) and data.data_dir == str(data_dir)
