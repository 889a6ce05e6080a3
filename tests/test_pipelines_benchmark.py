"""python -m pipelines.benchmark: what it writes, what it checks, and when it advises."""

import csv
import io
import json
import re

import numpy as np
import pytest
import tensorflow as tf
from conftest import check_fields, documented_fields, words

from pipelines import (
    INDEX,
    WEIGHT,
    DataConfig,
    advice,
    benchmark,
    cli,
    graph_model,
    load_data,
    measure,
    quality,
    variants,
)

QUICK = words("--num_batches=3 --warmup_batches=1 --repeats=2")


@pytest.fixture(scope="module")
def data_flags(data_dir):
    return ["--dataset=builders:Images", f"--data_dir={data_dir}", "--batch_size=8"]


@pytest.fixture
def run(data_flags, capfd):
    """Runs the command in this process; returns (exit code, stdout, last line of stderr)."""

    def run(*flags):
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.run(benchmark.main, ["benchmark", *data_flags, *flags])
        out, err = capfd.readouterr()
        return stop.value.code, out, err.strip().splitlines()[-1] if err.strip() else ""

    return run


def config(data_dir, **fields):
    return DataConfig(**{"dataset": "builders:Images", "data_dir": str(data_dir), **fields})


# What is written.


def check_row(row):
    common, measured, stage, against, summary = documented_fields(benchmark.__doc__)
    if row["stage"] == "summary":
        fields = common | summary
    else:
        fields = common | measured
        other = row["stage"] == "one_batch" or row["stage"].startswith("baseline:")
        fields |= against if other else stage
    check_fields(row, fields)


@pytest.fixture(scope="module")
def rows(data_flags, tmp_path_factory):
    """Rows of a run with all there is, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("rows")
    extra = [f"--output={folder}/rows.jsonl", f"--plot={folder}/plot.png", "--format=jsonl"]
    flags = [*data_flags, *QUICK, *extra, "--baselines", "--augment=flip"]
    with pytest.raises(SystemExit) as stop:
        cli.run(benchmark.main, ["benchmark", *flags])
    assert stop.value.code == 0
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()], folder


def test_rows_keep_to_the_documented_schema(rows):
    for row in rows[0]:
        check_row(row)


def test_rows_are_stages_the_whole_others_and_a_summary(rows, data_flags):
    names = [row["stage"] for row in rows[0]]
    stages = names[: names.index("pipeline")]
    assert stages == ["order", "read", "augment", "batch", "prefetch"]
    assert names[len(stages) + 1 :] == [
        "one_batch",
        "baseline:naive",
        "baseline:naive_parallel",
        "baseline:tfds_guide",
        "baseline:numpy",
        "baseline:keras_arrays",
        "summary",
    ]
    assert rows[0][-1]["limiting_stage"] in stages


def test_rows_say_what_was_measured(rows):
    for row in rows[0][:-1]:
        assert (row["batches"], row["warmup_batches"], row["repeats"]) == (3, 1, 2)
        assert row["examples"] >= 3 * 8
        assert row["examples_per_sec_min"] <= row["examples_per_sec"] <= row["examples_per_sec_max"]
        assert row["peak_memory_mb"] > 0 and row["first_batch_secs"] > 0
    assert rows[0][0]["flags"]["augment"] == ["flip"]
    assert rows[0][0]["reader"] == "memory"
    assert rows[0][0]["cache_state"]["examples"] == "memory"
    assert (rows[1] / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_checks_find_nothing_wrong(rows):
    checks = rows[0][-1]["checks"]
    assert checks["visited"] == "pipeline"
    assert len(checks["epoch_secs"]) == 2 and checks["epoch_secs"][0] > 0
    assert checks["once"] == {"examples": 88, "left_out": 2, "skipped_records": 0, "ok": True}
    assert checks["resume"]["exact"] and checks["resume"]["step"] == 9
    assert checks["shuffle"]["file_order_z"] < 5


def test_a_sweep_measures_all_combinations(run):
    code, out, _ = run(
        *QUICK,
        "--format=csv",
        "--sweep=batch_size=8,16;prefetch_batches=0,4",
        *words("--stages=false --checks=false --advice=false"),
    )
    assert code == 0
    *rows, summary = csv.DictReader(io.StringIO(out))
    found = [json.loads(row["variant"]) for row in rows]
    assert found == [
        {"batch_size": size, "prefetch_batches": ahead} for size in (8, 16) for ahead in (0, 4)
    ]
    assert {row["stage"] for row in rows} == {"pipeline"}
    assert summary["stage"] == "summary" and json.loads(summary["fastest_variant"]) in found


def test_a_table_for_people(run):
    code, out, _ = run(*QUICK, "--to_device", "--advice=false")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["stage", "examples/s"]
    assert any(line.startswith("limiting stage: ") for line in lines)
    assert any(
        line.startswith("every example once: yes (88 an epoch, 2 left out") for line in lines
    )
    assert any(re.match(r"resume at step 9: exact, .* 8 bytes of state", line) for line in lines)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--sweep=nothing=1,2"], "no flag 'nothing' to sweep; there are augment, batch_size,"),
        (["--sweep=format=csv"], "no flag 'format' to sweep"),
        (["--sweep=batch_size"], "'batch_size' is not flag=value,value"),
        (["--sweep=seed=1;seed=2"], "'seed' is named twice"),
        (['--sweep=augment="flip,crop'], "is no list: unexpected end of data"),
        (["--sweep=batch_size=8,8"], "'batch_size' takes a value twice"),
        (["--sweep=batch_size=8,many"], "flag --batch_size=many: invalid literal"),
        (["--sweep=batch_size="], "flag --batch_size=: invalid literal"),
        (["--sweep=batch_size=8,9000"], "--batch_size=9000 is larger than the 90 examples"),
        (["--sweep=reader=disk"], "--reader=disk"),
        (["--repeats=0"], "--repeats"),
        (["--output=no/such/folder/rows"], "--output=no/such/folder/rows: cannot write there"),
        (["--output="], "--output=: cannot write there"),
        (["--plot="], "--plot=: the name of a picture"),
        (["--plot=no/such/folder/plot.png"], "--plot=no/such/folder/plot.png: cannot write"),
        (["--plot=plot.pdf"], "must end in .png"),
        (["leftover"], "unexpected argument 'leftover'"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(run, monkeypatch, flags, told):
    monkeypatch.setattr(measure, "take_turn", lambda *args: pytest.fail("it measures"))
    code, out, error = run(*flags)
    assert code == 1 and not out
    assert error.startswith("error: ") and told in error


def test_a_run_that_fails_leaves_older_rows(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("older")
    code, _, error = run("--dataset=builders:Failing", f"--output={path}")
    assert code == 1 and "broken" in error
    assert path.read_text() == "older"


def test_a_plot_without_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setattr("pipelines.plots.available", lambda: False)
    code, _, error = run(f"--plot={tmp_path}/plot.png")
    assert code == 1 and "pip install 'pipeline-trainer[plots]'" in error


def test_sweeps_of_values_with_commas():
    assert benchmark.parse_sweep('augment=,flip,"flip,crop"; seed=1') == {
        "augment": ["", "flip", "flip,crop"],
        "seed": ["1"],
    }
    assert benchmark.parse_sweep("augment=;seed=1") == {"augment": [""], "seed": ["1"]}


# What is measured.


@pytest.mark.parametrize("drop", [True, False])
def test_the_whole_is_what_training_consumes(data_dir, drop):
    """So its rate is that of a stopwatch around a loop over the same pipeline."""
    variant = variants.load({}, config(data_dir, batch_size=16, drop_remainder=drop), [])
    items = variant.whole().open_fn()
    steps = 0
    for chunk, num_steps in variant.pipeline.chunks(num_epochs=None):
        element, count = next(items)
        assert element[INDEX].numpy().tolist() == chunk[INDEX].numpy().tolist()
        assert count == chunk[WEIGHT][:num_steps].numpy().sum()
        steps += num_steps
        if steps > 3 * variant.pipeline.steps_per_epoch:
            break


def test_a_turn_counts_whole_elements_after_a_warm_up():
    taken = []

    def items():
        for i in range(100):
            taken.append(i)
            yield np.zeros([10, 3], np.float32), 10

    subject = measure.Subject("ten", items, batch_size=5)
    turn = measure.take_turn(subject, measure.Length(num_batches=7, warmup_batches=4))
    assert (turn.warmup_examples, turn.examples) == (20, 40)  # of 35 asked for
    assert len(taken) == 6
    assert turn.bytes_per_example == 12
    assert turn.rate == turn.examples / turn.secs


def test_variants_share_a_reader_and_yield_what_they_would_alone(data_dir):
    wanted = [
        config(data_dir, batch_size=8, augment=("crop",)),
        config(data_dir, batch_size=30, augment=("crop",), num_parallel_calls=1),
        config(data_dir, batch_size=8, augment=()),
    ]
    first, second, third = variants.load_all([({}, c) for c in wanted])
    assert second.pipeline.reader is first.pipeline.reader
    assert third.pipeline.reader is not first.pipeline.reader
    alone = load_data(wanted[1], evaluating=False).train
    pairs = zip(second.pipeline.batches(2).take(3), alone.batches(2).take(3), strict=True)
    for shared, own in pairs:
        for key, tensor in own.items():
            np.testing.assert_array_equal(shared[key], tensor)


def test_the_feed_copies_each_replicas_rows():
    feed = measure.DeviceFeed()
    feed.devices = [d.name for d in tf.config.list_logical_devices("CPU")]
    assert len(feed.devices) == 3
    chunk = {"x": tf.reshape(tf.range(2 * 6 * 5), [2, 6, 5])}
    feed(chunk)
    feed(None)
    assert all(t.device.endswith(d) for t, d in zip(feed.sent, feed.devices, strict=True))
    np.testing.assert_array_equal(tf.concat(feed.sent, axis=1), chunk["x"])


def test_tensorflows_account_of_the_graph(data_dir, monkeypatch):
    pipeline = load_data(config(data_dir, batch_size=8), evaluating=False).train
    dataset, size = pipeline.dataset(), 8
    costs = graph_model.node_costs(dataset, size)
    assert costs and all(cost > 0 for cost in costs.values())
    monkeypatch.delattr(tf.data.experimental, "get_model_proto")
    assert graph_model.node_costs(dataset, size) is None


# Promises.


@pytest.mark.parametrize("reader", ["memory", "indexed", "stream"])
def test_promises_hold_for_each_reader(data_dir, monkeypatch, reader):
    monkeypatch.setattr(quality, "_RESUMES", 1)
    wanted = config(data_dir, dataset="builders:Vectors", batch_size=4, reader=reader)
    pipeline = load_data(wanted, evaluating=False).train
    by_reading = quality.check(pipeline, examples_per_sec=1e6)
    by_order = quality.check(pipeline, examples_per_sec=1e-6)
    assert (by_reading["visited"], by_order["visited"]) == ("pipeline", "order")
    for checks in (by_reading, by_order):
        assert checks["once"]["ok"] and checks["resume"]["exact"]
    assert by_reading["shuffle"] == by_order["shuffle"]


def test_examples_missed_repeated_or_made_up_are_found():
    whole = np.arange(10)
    assert quality.once([whole, whole[::-1]], 10, 10)["ok"]
    for wrong in (whole[:-1], np.append(whole[:-1], 0), np.append(whole[:-1], 10), whole[:0]):
        assert not quality.once([whole, wrong], 10, 10)["ok"]
    assert quality.once([whole[:-1], whole[1:]], 10, 10, num_skipped=1)["ok"]


def test_scores_tell_a_shuffle_from_an_order():
    rng = np.random.default_rng(0)
    good = quality.shuffle_scores(rng.permutation(10_000), rng.permutation(10_000))
    assert good["file_order_z"] < 4 and good["epochs_z"] < 4 and good["parity_z"] < 4
    assert good["kept_neighbours"] < 10
    ordered = np.arange(10_000)
    bad = quality.shuffle_scores(ordered, ordered)
    assert bad["file_order_corr"] == pytest.approx(1) == pytest.approx(bad["epochs_corr"])
    assert bad["kept_neighbours"] == 9_999 and bad["parity_z"] == pytest.approx(100)


# Advice.


def findings(**changes):
    return advice.Findings(
        **{
            "config": DataConfig(),
            "reader": "memory",
            "cores": 4,
            "cpu_us_per_example": 10.0,
            "added_cpu_us": {"order": 0.1, "read": 1.0, "augment": 8.9},
            "headroom": 1.1,
            "chunk_steps": 16,
            "fits_in_memory": True,
            **changes,
        }
    )


def flags_of(found):
    return [idea.flags for idea in advice.candidates(found)]


def test_ideas_follow_from_the_figures():
    assert flags_of(findings()) == []
    slow = DataConfig(num_parallel_calls=1, prefetch_batches=1)
    assert flags_of(findings(config=slow, headroom=3.0)) == [
        {"num_parallel_calls": 0},
        {"prefetch_batches": 0},
    ]
    assert {"num_parallel_calls": 16} in flags_of(findings(headroom=2.0))
    assert flags_of(findings(reader="indexed")) == [{"reader": "memory"}]
    assert advice.candidates(findings(reader="indexed"))[0].same_batches
    assert not advice.candidates(findings(reader="stream"))[0].same_batches
    assert {"reader": "stream"} in flags_of(
        findings(reader="indexed", fits_in_memory=False, headroom=2.0)
    )
    tiny = findings(config=DataConfig(batch_size=2), added_cpu_us={"order": 9.0})
    assert flags_of(tiny) == [{"batch_size": 8}]
    assert {"image_size": 160} in flags_of(findings(config=DataConfig(image_size=224)))
    assert flags_of(findings(config=DataConfig(use_synthetic_data=True), headroom=9.0)) == []


def test_only_what_helps_twice_is_advised():
    """The first measurement chooses, the second one counts."""
    base = DataConfig()
    ideas = [advice.Candidate({"seed": i}, 2.0) for i in (1, 2, 3)]
    speeds = {1: [1.5, 1.4], 2: [1.0], 3: [1.3, 0.9]}  # as first and as then measured

    def rates(configs, repeats):
        return [
            [100.0] * repeats if c == base else [100.0 * speeds[c.seed].pop(0)] * repeats
            for c in configs
        ]

    advised, vain = advice.try_out(base, ideas, rates, repeats=4)
    assert [told["flags"] for told in advised] == [{"seed": 1}]
    assert advised[0]["measured_gain"] == pytest.approx(1.4)
    assert [told["flags"] for told in vain] == [{"seed": 2}, {"seed": 3}]


def test_a_gain_that_only_some_turns_show_is_none():
    def rates(configs, repeats):
        return [[100.0] * 4, [300.0, 300.0, 90.0, 90.0]]

    advised, vain = advice.try_out(DataConfig(), [advice.Candidate({"seed": 1}, 2.0)], rates, 4)
    assert not advised and len(vain) == 1


def test_nothing_is_advised_where_nothing_can_be_tried():
    assert advice.try_out(DataConfig(), [], lambda *args: pytest.fail("it measures"), 5) == ([], [])


def test_applied_flags_are_as_if_given():
    idea = advice.Candidate({"num_parallel_calls": 0, "batch_size": 64}, 2.0)
    assert idea.applied_to(DataConfig(num_parallel_calls=7)) == DataConfig(batch_size=64)
