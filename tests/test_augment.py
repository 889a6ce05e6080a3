"""Augmentations: what they do, and that an example's depends on nothing but its seed."""

import builders
import numpy as np
import pytest
import tensorflow as tf

import pipelines
from pipelines import UserError, augment, images, mix
from pipelines.features import Spec
from pipelines.randomness import example_seeds

NAMES = ("color", "crop", "cutout", "flip", "randaug")
M = 24


def seeds(count=M, epoch=0):
    return example_seeds(
        3, tf.fill([count], tf.constant(epoch, tf.int64)), tf.range(count, dtype=tf.int64)
    )


def pictures(shape=(12, 16, 3), count=M, dtype=np.uint8):
    rng = np.random.default_rng(0)
    return tf.constant(rng.integers(0, np.iinfo(dtype).max + 1, (count, *shape), dtype))


def spec_of(shape, dtype="uint8"):
    keys = ("image", "label")
    return Spec("image", shape, dtype, "label", (), 3, None, (3,), True, keys, shape)


def augment_fn(names, shape=(12, 16, 3), crops=False):
    return augment.make_augment_fn(names, spec_of(shape), crops)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 3])
def test_shape_and_type_stay_and_examples_are_independent_of_their_batch(name, dtype, channels):
    before = pictures((12, 16, channels), dtype=dtype)
    fn = tf.function(augment._IMAGE_FNS[name])
    after = fn(before, seeds())
    assert after.shape == before.shape and after.dtype == before.dtype
    assert (after.numpy() != before.numpy()).any()
    np.testing.assert_array_equal(fn(before, seeds()), after)
    assert (fn(before, seeds(epoch=1)).numpy() != after.numpy()).any()
    rows = tf.constant([7, 2, 19])
    np.testing.assert_array_equal(
        fn(tf.gather(before, rows), tf.gather(seeds(), rows)), tf.gather(after, rows)
    )


def test_flip_mirrors_half_of_the_images():
    before = pictures(count=1000).numpy()
    after = augment.flip(before, seeds(1000)).numpy()
    flipped = [np.array_equal(a, b[:, ::-1]) for a, b in zip(after, before, strict=True)]
    kept = [np.array_equal(a, b) for a, b in zip(after, before, strict=True)]
    assert np.logical_xor(flipped, kept).all()
    assert 420 < sum(flipped) < 580


@pytest.mark.parametrize("shape", [(28, 28, 1), (16, 24, 3)])
def test_crop_shifts_within_the_padding(shape):
    before = pictures(shape, 500).numpy()
    after = augment.crop(before, seeds(500)).numpy()
    pads = [side // 8 for side in shape[:2]]
    padded = np.pad(before, [(0, 0), (pads[0],) * 2, (pads[1],) * 2, (0, 0)])
    shifts = set()
    for image, place in zip(after, padded, strict=True):
        found = [
            (y, x)
            for y in range(2 * pads[0] + 1)
            for x in range(2 * pads[1] + 1)
            if np.array_equal(place[y : y + shape[0], x : x + shape[1]], image)
        ]
        assert len(found) == 1
        shifts.update(found)
    assert {y for y, _ in shifts} == set(range(2 * pads[0] + 1))
    assert {x for _, x in shifts} == set(range(2 * pads[1] + 1))


def test_cutout_blanks_one_rectangle_of_at_most_half_the_side():
    before = np.full((200, 16, 24, 3), 9, np.uint8)
    after = augment.cutout(before, seeds(200)).numpy()
    areas = (after[..., 0] == 0).sum((1, 2))
    assert set(np.unique(after)) == {0, 9}
    assert areas.max() == 8 * 12 and areas.min() >= 4 * 6
    assert len(np.unique(areas)) > 10


def test_color_keeps_grey_grey_and_stays_in_range():
    grey = np.repeat(np.random.default_rng(0).integers(0, 256, (50, 8, 8, 1)), 3, 3).astype(
        np.uint8
    )
    after = augment._IMAGE_FNS["color"](tf.constant(grey), seeds(50)).numpy().astype(int)
    assert np.abs(after[..., 0] - after[..., 1]).max() <= 1
    ratios = after.mean((1, 2, 3)) / grey.mean((1, 2, 3))
    assert 0.55 < ratios.min() < 0.8 and 1.1 < ratios.max() < 1.45


def test_policies_draw_every_operation_and_leave_some_images_alone():
    before = pictures((16, 16, 3), 300)
    after = tf.function(augment._IMAGE_FNS["randaug"])(before, seeds(300)).numpy()
    same = (after == before.numpy()).all((1, 2, 3))
    assert 5 < same.sum() < 120


@pytest.mark.parametrize(("height", "width"), [(120, 120), (30, 400), (7, 7), (1, 1)])
def test_random_windows_lie_inside_and_cover_what_they_should(height, width):
    count = 2000
    shapes = tf.fill([count, 2], 0) + [height, width]
    y, x, h, w = images.random_windows(shapes, seeds(count)).numpy().T
    assert (y >= 0).all() and (x >= 0).all() and (h >= 1).all() and (w >= 1).all()
    assert (y + h <= height).all() and (x + w <= width).all()
    if min(height, width) >= 100:
        shares, ratios = h * w / (height * width), w / h
        assert 0.06 < shares.min() < 0.1 and 0.9 < shares.max() <= 1
        assert 0.7 < ratios.min() < 0.8 and 1.25 < ratios.max() < 1.4
        assert y.max() + 1 > height * 0.6 and x.max() + 1 > width * 0.6


def test_center_windows():
    windows = images.center_windows(tf.constant([[100, 200], [64, 64]]))
    np.testing.assert_array_equal(windows, [[6, 56, 88, 88], [4, 4, 56, 56]])


def waves(height, width):
    y, x = np.mgrid[:height, :width] / 60
    channels = [np.sin(x * a + y * b) * 100 + 128 for a, b in ((1, 2), (2, 1), (3, 3))]
    return np.uint8(np.stack(channels, 2))


@pytest.mark.parametrize("reduction", [1, 2, 4, 8])
def test_reduced_decoding_shows_the_same_part(reduction):
    pixels = waves(400, 600)
    encoded = [tf.io.encode_jpeg(pixels, quality=98).numpy(), tf.io.encode_png(pixels).numpy()]
    size = 280 // reduction
    window = tf.constant([[40, 80, 300, 288]] * 2)
    assert images.reductions(window, (size, size)).numpy().tolist() == [reduction] * 2
    image = tf.TensorSpec([size, size, 3], tf.uint8)
    shown = images.decode_windows(tf.constant(encoded), window, tf.constant([False, True]), image)
    expected = tf.image.resize(pixels[40:340, 80:368], (size, size), antialias=True).numpy()
    for result in (shown[0].numpy(), shown[1].numpy()[:, ::-1]):
        assert np.abs(result.astype(float) - expected).mean() < 5


def test_levels_hold_what_windows_show():
    pixels = waves(130, 170)
    data = tf.io.encode_jpeg(pixels, quality=90)
    flat = images.decode_levels(data, tf.constant(3), 3, tf.uint8).numpy()
    sizes = [(130, 170), (65, 85), (33, 43)]
    assert len(flat) == sum(h * w * 3 for h, w in sizes)
    start = 65 * 85 * 3
    level = flat[130 * 170 * 3 :][:start].reshape(65, 85, 3)
    window = np.array([[21, 31, 64, 66]])
    image = tf.TensorSpec([32, 32, 3], tf.uint8)
    shown = images.decode_windows(
        data[None], tf.constant(window, tf.int32), tf.constant([False]), image
    )
    part = level[10 : 10 + 32, 15 : 15 + 33]
    np.testing.assert_array_equal(shown[0], images.resize(tf.constant(part), image))


def test_headers_tell_shapes():
    encoded = [
        tf.io.encode_jpeg(waves(40, 50)),
        tf.io.encode_png(waves(33, 7)),
        tf.io.encode_png(pictures((5, 6, 1), 1, np.uint16)[0]),
    ]
    np.testing.assert_array_equal(images.shapes_of(tf.stack(encoded)), [[40, 50], [33, 7], [5, 6]])


# Composition.


def test_flip_in_decoding_is_the_flip_of_the_list():
    names = ("rrc", "flip", "cutout")
    assert augment.flip_salt(names) == 1
    assert augment.flip_salt(("cutout", "flip")) is None
    before = pictures()
    whole = augment_fn(names)({"image": before}, seeds())["image"]
    view = images.View((12, 16), True, augment.flip_salt(names))
    mirrored = view.mirrored(seeds())[:, None, None, None]
    rest = augment.make_augment_fn(names, spec_of((12, 16, 3)), crops=False, flips=False)
    flipped = tf.where(mirrored, before[:, :, ::-1], before)
    np.testing.assert_array_equal(rest({"image": flipped}, seeds())["image"], whole)


def test_two_of_a_kind_draw_differently():
    once = augment_fn(("cutout",))({"image": pictures()}, seeds())["image"].numpy()
    twice = augment_fn(("cutout", "cutout"))({"image": pictures()}, seeds())["image"].numpy()
    assert (twice == 0).sum() > (once == 0).sum() * 1.2


def test_random_crops_of_images_of_one_size():
    fn = augment.make_augment_fn(("rrc",), spec_of((10, 10, 3)), crops=True)
    after = fn({"image": pictures()}, seeds())["image"]
    assert after.shape == (M, 10, 10, 3)
    assert len({a.tobytes() for a in after.numpy()}) == M


def test_what_happens_elsewhere_needs_no_function():
    assert augment_fn(("rrc", "mixup", "cutmix", "center")) is None


def with_python_control_flow(example, seed):
    if tf.reduce_sum(seed) % 2 == 0:
        return {**example, "image": tf.zeros_like(example["image"])}
    return example


def in_numpy(example, seed):
    def invert(image, seed):
        assert seed.shape == (2,)
        return 255 - image

    return {**example, "image": tf.numpy_function(invert, [example["image"], seed], tf.uint8)}


def test_functions_of_users():
    examples = {"image": pictures(), "label": tf.range(M)}
    after = tf.function(augment_fn((in_numpy,)))(examples, seeds())
    np.testing.assert_array_equal(after["image"], 255 - pictures().numpy())
    assert after["image"].shape == (M, 12, 16, 3)
    after = tf.function(augment_fn((with_python_control_flow,)))(examples, seeds())["image"]
    even = seeds().numpy().sum(1) % 2 == 0
    np.testing.assert_array_equal((after.numpy() == 0).all((1, 2, 3)), even)


def raises(example, seed):
    raise KeyError("no such entry")


def returns_nothing(example, seed):
    return None


@pytest.mark.parametrize(
    ("fn", "said"), [(raises, "KeyError: 'no such entry'"), (returns_nothing, "must return")]
)
def test_faults_of_users_functions_are_told_before_training(fn, said):
    types = {"image": tf.TensorSpec([4, 4, 3], tf.uint8)}
    with pytest.raises(UserError, match=f"--augment=test_augment:{fn.__name__}: .*{said}"):
        augment.check_calls((fn,), types)


def test_names_are_checked():
    image, vector = spec_of((8, 8, 3)), spec_of((4,))
    float_image = spec_of((8, 8, 3), "float32")
    vector = __import__("dataclasses").replace(vector, is_image=False)
    for names, spec, varying, said in (
        (("flop",), image, False, "unknown augmentation; choose from center, color"),
        (("flip",), vector, False, "works on images"),
        (("color",), float_image, False, "integer pixels"),
        (("center",), image, False, "leave it out"),
        (("rrc", "center"), image, True, "exclude"),
    ):
        with pytest.raises(UserError, match=said):
            augment.check_names(names, spec, varying)
    augment.check_names(("rrc", "flip", "mixup", "center")[:3], image, False)


# Mixing.


def mixed(fn, step=5, **kwargs):
    inputs = tf.cast(pictures((16, 16, 3), 8), tf.float32)
    labels = tf.one_hot(tf.range(8), 8)
    seed = tf.constant([3, step])
    return inputs.numpy(), *(t.numpy() for t in fn(inputs, labels, seed, **kwargs))


@pytest.mark.parametrize("jit", [False, True])
def test_mixup_is_the_mean_of_pairs(jit):
    fn = tf.function(mix.mixup, jit_compile=jit)
    before, inputs, labels = mixed(fn)
    weight = labels[0, 0]
    partner = np.arange(8) ^ 1
    np.testing.assert_allclose(inputs, weight * before + (1 - weight) * before[partner], rtol=1e-4)
    np.testing.assert_allclose(
        labels, weight * np.eye(8) + (1 - weight) * np.eye(8)[partner], atol=1e-6
    )
    assert weight != mixed(fn, step=6)[2][0, 0]


@pytest.mark.parametrize("jit", [False, True])
def test_cutmix_pastes_a_rectangle_and_counts_its_pixels(jit):
    fn = tf.function(mix.cutmix, jit_compile=jit)
    for step in range(5):
        before, inputs, labels = mixed(fn, step)
        partner = np.arange(8) ^ 1
        pasted = (inputs == before[partner]).all(3) & (inputs != before).any(3)
        kept = (inputs == before).all(3)
        assert (pasted | kept).all()
        np.testing.assert_allclose(labels[0, 1], pasted[0].mean(), atol=0.02)
        np.testing.assert_allclose(labels.sum(1), 1, atol=1e-6)


@pytest.mark.parametrize("fn", [mix.mixup, mix.cutmix])
def test_xla_draws_the_same_mixes(fn):
    """One replica may be compiled by it where several are not."""
    for plain, compiled in zip(mixed(fn), mixed(tf.function(fn, jit_compile=True)), strict=True):
        np.testing.assert_allclose(compiled, plain, rtol=1e-5, atol=1e-6)


def test_replicas_mix_their_rows_as_the_whole_batch_would():
    for names in (("mixup",), ("cutmix",), ("mixup", "cutmix")):
        fn = mix.make_mix_fn(names)
        inputs, labels = tf.cast(pictures((6, 6, 3), 8), tf.float32), tf.one_hot(tf.range(8), 8)
        seed = tf.constant([0, 1])
        whole = fn(inputs, labels, seed)
        parts = [fn(inputs[i : i + 4], labels[i : i + 4], seed) for i in (0, 4)]
        for i in range(2):
            np.testing.assert_array_equal(whole[i], tf.concat([p[i] for p in parts], 0))
    assert mix.make_mix_fn(("flip",)) is None
    with pytest.raises(ValueError, match="even number"):
        mix.mixup(inputs[:3], labels[:3], seed)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_weights_are_beta_distributed(alpha):
    draws = (np.arange(20_000, dtype=np.float32) + 0.5) / 20_000
    values = np.array(mix._beta(tf.constant(draws), alpha))
    assert abs(values.mean() - 0.5) < 0.003
    assert abs(values.var() - 1 / (4 * (2 * alpha + 1))) < 0.003


def test_training_and_evaluation_see_what_they_should(tmp_path):
    builder = builders.Images(data_dir=tmp_path)
    builder.download_and_prepare()
    config = pipelines.DataConfig(
        dataset=str(builder.data_dir), batch_size=30, augment=("flip", "crop", "mixup")
    )
    data = pipelines.load_data(config, mixing=True)
    assert data.mix_fn is mix.mixup
    plain = pipelines.load_data(pipelines.DataConfig(dataset=config.dataset, batch_size=30))
    assert plain.mix_fn is None
    ours, theirs = (next(iter(d.train.batches()))["image"].numpy() for d in (data, plain))
    assert (ours != theirs).any((1, 2, 3)).mean() > 0.8
    ours, theirs = (next(iter(d.evaluation.batches()))["image"].numpy() for d in (data, plain))
    np.testing.assert_array_equal(ours, theirs)
