"""Shipped models: sizes as published, shapes, gradients, precision, errors."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipelines import UserError
from trainer.models import _embed_patches, available_models, build_model, check_name


def make_spec(input_shape, num_classes=10, output_shape=None):
    return types.SimpleNamespace(
        input_shape=input_shape,
        input_dtype="uint8" if len(input_shape) == 3 else "float32",
        num_classes=num_classes,
        output_shape=(num_classes,) if output_shape is None else output_shape,
    )


def regression_spec(input_shape, output_shape):
    return make_spec(input_shape, num_classes=None, output_shape=output_shape)


def make_inputs(input_shape, batch=2):
    return np.random.default_rng(0).random((batch, *input_shape), dtype=np.float32)


def num_trainable(model):
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


# A cheap case of each family.
FAMILIES = {
    "mlp": (28, 28, 1),
    "cnn": (28, 28, 1),
    "resnet20": (16, 16, 3),
    "resnet18": (32, 32, 3),
    "resnet50": (32, 32, 3),
    "vit_tiny": (8, 8, 1),
    "MobileNet": (32, 32, 3),
}


@pytest.fixture(scope="module")
def small_models():
    """Name -> model for 7 classes, each built once."""
    keras.utils.set_random_seed(0)
    return {name: build_model(name, make_spec(shape, 7)) for name, shape in FAMILIES.items()}


@pytest.mark.parametrize(
    ("name", "input_shape", "num_classes", "expected"),
    [
        # He et al. 2015, table 6: 0.27 M and 0.85 M.
        ("resnet20", (32, 32, 3), 10, 269_722),
        ("resnet56", (32, 32, 3), 10, 853_018),
        # The usual counts of other libraries for 1,000 classes.
        ("resnet18", (224, 224, 3), 1000, 11_689_512),
        ("resnet50", (224, 224, 3), 1000, 25_557_032),
        # DeiT's 5,717,416 and 22,050,664 less two redundant vectors of the model's width.
        ("vit_tiny", (224, 224, 3), 1000, 5_717_416 - 2 * 192),
        ("vit_small", (224, 224, 3), 1000, 22_050_664 - 2 * 384),
        # Sandler et al. 2018, table 4: 3.4 M.
        ("MobileNetV2", (224, 224, 3), 1000, 3_504_872),
    ],
)
def test_parameter_counts_are_the_published_ones(name, input_shape, num_classes, expected):
    assert num_trainable(build_model(name, make_spec(input_shape, num_classes))) == expected


def test_textbook_mlp():
    model = build_model("mlp", make_spec((28, 28, 1)), hidden_units=(10,))
    assert model.count_params() == 7_960


@pytest.mark.parametrize(
    ("hidden_units", "widths"), [((), [2]), ((5,), [5, 2]), ((7, 6, 5), [7, 6, 5, 2])]
)
def test_hidden_units_are_the_widths_of_the_dense_layers(hidden_units, widths):
    for name in ("mlp", "cnn"):
        model = build_model(name, make_spec((8, 8, 1), 2), hidden_units=hidden_units)
        dense = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]
        assert [layer.units for layer in dense] == widths


@pytest.mark.parametrize("name", FAMILIES)
def test_logits(small_models, name):
    outputs = small_models[name](make_inputs(FAMILIES[name]))
    assert outputs.shape == (2, 7)
    assert outputs.dtype == tf.float32


@pytest.mark.parametrize("name", FAMILIES)
def test_every_trainable_variable_gets_a_gradient(small_models, name):
    model = small_models[name]
    inputs, labels = make_inputs(FAMILIES[name], batch=4), np.arange(4)

    with tf.GradientTape() as tape:
        outputs = model(inputs, training=True)
        loss = tf.reduce_mean(
            keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)
        )
    gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        assert gradient is not None, variable.path
        # Softmax ignores what all keys share, so a key's bias has no effect on the loss.
        if not variable.path.endswith("key/bias"):
            assert np.any(gradient), variable.path


@pytest.mark.parametrize("name", ["mlp", "cnn", "MobileNet"])
@pytest.mark.parametrize("output_shape", [(), (3,), (2, 2)])
def test_regression_has_the_shape_of_the_target(name, output_shape):
    model = build_model(name, regression_spec((32, 32, 1), output_shape))
    outputs = model(make_inputs((32, 32, 1)))
    assert outputs.shape == (2, *output_shape)
    assert outputs.dtype == tf.float32


@pytest.mark.parametrize("input_shape", [(), (13,), (4, 5), (4, 4, 1)])
def test_auto_takes_an_mlp_for_what_is_not_an_image(input_shape):
    model = build_model("auto", make_spec(input_shape, 3))
    assert model.name == "mlp"
    assert model(make_inputs(input_shape)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "side", "resolved"),
    [
        ("auto", 8, "cnn"),
        ("resnet", 32, "resnet20"),
        ("resnet", 64, "resnet50"),
        ("vit", 32, "vit_tiny"),
        ("mobilenet", 32, "MobileNet"),
        ("ResNet50", 32, "ResNet50"),
    ],
)
def test_names(name, side, resolved):
    assert build_model(name, make_spec((side, side, 3))).name == resolved


@pytest.mark.parametrize(
    ("input_shape", "num_patches"),
    [
        ((224, 224, 3), 196),
        ((128, 128, 3), 64),
        ((64, 64, 3), 64),
        ((32, 32, 3), 64),
        ((28, 28, 1), 49),
        ((8, 8, 1), 64),
        ((30, 43, 3), 54),  # padded to 30x45: 6 x 9 patches of 5
    ],
)
def test_patch_size_follows_the_image(input_shape, num_patches):
    tokens = _embed_patches(keras.Input(input_shape), width=8)
    assert tokens.shape == (None, 1 + num_patches, 8)


def test_embedding_is_projection_plus_position():
    inputs = keras.Input((8, 12, 2))
    model = keras.Model(inputs, _embed_patches(inputs, width=5))
    images = make_inputs((8, 12, 2))
    tokens = model(images)
    kernel, bias = model.get_weights()
    # ceil(sqrt(8 * 12 / 64)) = 2: 4 x 6 patches, in reading order.
    second_patch = images[:, 0:2, 2:4].reshape(2, 8)
    seventh_patch = images[:, 2:4, 0:2].reshape(2, 8)
    np.testing.assert_allclose(tokens[:, 0], np.stack([bias[0], bias[0]]), atol=1e-6)
    np.testing.assert_allclose(tokens[:, 2], second_patch @ kernel + bias[2], atol=1e-6)
    np.testing.assert_allclose(tokens[:, 7], seventh_patch @ kernel + bias[7], atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_same_seed_same_weights(name):
    spec = make_spec((16, 16, 1))

    def weights(seed):
        keras.utils.set_random_seed(seed)
        return build_model(name, spec).get_weights()

    first, second, other = weights(1), weights(1), weights(2)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ["cnn", "resnet20", "vit_tiny"])
def test_layers_of_one_shape_start_with_different_weights(small_models, name):
    variables = small_models[name].trainable_variables
    kernels = [v.numpy().tobytes() for v in variables if v.path.endswith("kernel")]
    assert len(set(kernels)) == len(kernels)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("mlp", "mixed_bfloat16"),
        ("cnn", "mixed_float16"),
        ("resnet20", "mixed_float16"),
        ("vit_tiny", "mixed_float16"),
        ("MobileNet", "mixed_float16"),  # its top is a convolution
        ("MobileNetV2", "mixed_float16"),  # its top is a dense layer
    ],
)
def test_mixed_precision_ends_in_float32(name, policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = build_model(name, make_spec((32, 32, 1)))
        assert model(make_inputs((32, 32, 1))).dtype == tf.float32
        assert model.layers[1].compute_dtype == policy.removeprefix("mixed_")
        assert all(variable.dtype == "float32" for variable in model.trainable_variables)
        assert model.layers[-1].compute_dtype == "float32"
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("name", ["resnet20", "vit_tiny"])
def test_saved_model_is_made_of_plain_keras_layers(name, tmp_path, small_models):
    path = tmp_path / "model.keras"
    model = small_models[name]
    model.save(path)
    loaded = keras.models.load_model(path)
    inputs = make_inputs(FAMILIES[name])
    np.testing.assert_allclose(loaded(inputs), model(inputs), atol=1e-5)
    modules = {layer["module"] for layer in model.get_config()["layers"]}
    assert all(module.startswith("keras.") for module in modules)


@pytest.mark.parametrize("name", ["cnn", "resnet20"])
def test_layer_names_do_not_depend_on_models_built_before(name):
    spec = make_spec((16, 16, 3))
    paths = [[v.path for v in build_model(name, spec).variables] for _ in range(2)]
    assert paths[0] == paths[1]


def test_efficientnet_undoes_the_scaling_it_does_itself():
    model = build_model("EfficientNetB0", make_spec((32, 32, 3), 2))
    stem_inputs = keras.Model(model.input, model.get_layer("normalization").input)
    images = make_inputs((32, 32, 3))
    np.testing.assert_allclose(stem_inputs(images), images, atol=1e-6)


def test_unknown_name_says_what_exists():
    check_name("mobilenetv2")
    with pytest.raises(UserError) as error:
        build_model("foo", make_spec((28, 28, 1)))
    assert str(error.value).startswith("--model=foo: unknown model; choose one of auto, mlp, cnn, ")
    assert "MobileNetV2" in str(error.value)


@pytest.mark.parametrize(
    ("name", "spec", "fragment"),
    [
        ("cnn", make_spec((13,)), "(13,)"),
        ("vit", make_spec(()), "()"),
        ("resnet", make_spec((8, 8)), "(8, 8)"),
        ("MobileNetV2", make_spec((13,)), "(13,)"),
        ("VGG16", make_spec((28, 28, 1)), "32x32"),
        ("cnn", make_spec((None, None, 3)), "--image_size"),
    ],
)
def test_unfit_shapes_are_refused_in_one_line(name, spec, fragment):
    with pytest.raises(UserError) as error:
        build_model(name, spec)
    message = str(error.value)
    assert message.startswith(f"--model={name}: ")
    assert fragment in message
    assert "\n" not in message


def test_available_models():
    names = available_models()
    assert names[:3] == ["auto", "mlp", "cnn"]
    assert {"resnet", "resnet20", "resnet56", "resnet18", "resnet50", "vit"} <= set(names)
    assert {"vit_tiny", "vit_small", "MobileNetV2", "EfficientNetB0", "ConvNeXtTiny"} <= set(names)
    assert len(set(names)) == len(names)
