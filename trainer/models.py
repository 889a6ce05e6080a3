"""Models by name: multilayer perceptron, small conv net, ResNets, ViTs, `keras.applications`.

Every model takes scaled float32 input and returns float32 logits (or predictions), whatever the
precision policy in between. All are plain functional Keras models of built-in layers, so a saved
`.keras` file loads without this package. Layers carry stable names, for `--freeze` and checkpoints.
"""

import inspect
import math
from collections.abc import Callable, Sequence

import keras
from keras import layers

from pipelines import UserError


def build_model(name: str, spec, *, hidden_units: Sequence[int] = (128,)) -> keras.Model:
    """Builds a freshly initialised model; call it inside the strategy scope.

    Args:
        name: one of `available_models()`. `keras.applications` names match in any case, but
            `resnet50` is this module's and `ResNet50` theirs.
        spec: what the pipeline yields; read are `input_shape` (one example's, no batch dimension),
            `num_classes` (None for regression) and `output_shape` (one prediction's).
        hidden_units: widths of the hidden dense layers of `mlp` and `cnn`; the others have none.

    Returns:
        A model from float32 [batch, *input_shape], images scaled to [0, 1], to float32
        [batch, num_classes] logits or, for regression, [batch, *output_shape] predictions.

    Raises:
        UserError: no such model, or one that cannot take inputs of this shape.
    """
    input_shape = tuple(spec.input_shape)
    output_shape = tuple(spec.output_shape) if spec.num_classes is None else (spec.num_classes,)
    if None in input_shape:
        raise UserError(
            f"--model={name}: needs inputs of one fixed shape, not {input_shape}; "
            "for images set --image_size"
        )
    check_name(name)
    architecture = _resolve(name, input_shape)
    if architecture != "mlp" and len(input_shape) != 3:
        raise UserError(
            f"--model={name}: takes images [height, width, channels], "
            f"but the input has shape {input_shape}; --model=mlp takes any shape"
        )
    inputs = keras.Input(input_shape, name="inputs", dtype="float32")
    units = math.prod(output_shape)
    if architecture in _BACKBONES:
        outputs = _output_layer(units)(_BACKBONES[architecture](inputs, hidden_units))
    else:
        outputs = _application(name, getattr(keras.applications, architecture), inputs, units)
    if output_shape != (units,):
        outputs = layers.Reshape(output_shape, dtype="float32", name="outputs")(outputs)
    return keras.Model(inputs, outputs, name=architecture)


def check_name(name: str) -> None:
    """Refuses a name that `build_model` does not know.

    Raises:
        UserError: naming those it does.
    """
    if name not in _shipped_names() and name.lower() not in _applications():
        raise UserError(
            f"--model={name}: unknown model; choose one of {', '.join(_shipped_names())}, "
            "a keras.applications name (e.g. MobileNetV2), or module:function"
        )


def available_models() -> list[str]:
    """All names `build_model` knows, the package's own first, then `keras.applications`."""
    return _shipped_names() + sorted(function.__name__ for function in _applications().values())


# --- names ---


def _shipped_names() -> list[str]:
    return ["auto", *_BACKBONES, "resnet", "vit"]


def _resolve(name: str, input_shape: tuple[int, ...]) -> str:
    """What `auto`, a family's alias or an application's name in any case stands for."""
    is_image = len(input_shape) == 3
    short_side = min(input_shape[:2], default=0)
    if name == "auto":
        return "cnn" if is_image and short_side >= 8 else "mlp"
    if name == "resnet":
        return "resnet20" if short_side < 64 else "resnet50"
    if name == "vit":
        return "vit_tiny"
    return name if name in _BACKBONES else _applications()[name.lower()].__name__


def _applications() -> dict[str, Callable[..., keras.Model]]:
    """Lower-case name -> function of every architecture in `keras.applications`."""
    functions = inspect.getmembers(keras.applications, inspect.isfunction)
    return {function_name.lower(): function for function_name, function in functions}


# --- building blocks ---


def _output_layer(units: int) -> layers.Dense:
    # Under mixed precision the loss needs more digits than the half-width types keep.
    return layers.Dense(units, dtype="float32", name="logits")


def _conv_norm(
    x, filters: int, kernel_size: int, *, strides: int = 1, relu: bool = True, name: str
):
    """Convolution, batch norm and, unless told otherwise, ReLU: what ResNets are made of."""
    x = layers.Conv2D(
        filters,
        kernel_size,
        strides=strides,
        padding="same",
        use_bias=False,  # batch norm would subtract it again
        kernel_initializer="he_normal",
        name=f"{name}_conv",
    )(x)
    x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_norm")(x)
    return layers.ReLU(name=f"{name}_relu")(x) if relu else x


def _add_relu(x, shortcut, name: str):
    return layers.ReLU(name=f"{name}_relu")(layers.Add(name=f"{name}_add")([x, shortcut]))


# --- multilayer perceptron and small conv net ---


def _dense_stack(x, hidden_units: Sequence[int]):
    x = layers.Flatten(name="flatten")(x)
    for i, units in enumerate(hidden_units, start=1):
        x = layers.Dense(units, activation="relu", name=f"hidden{i}")(x)
    return x


def _cnn(x, hidden_units: Sequence[int]):
    """Stages of convolution, pooling and batch norm down to 4x4 pixels, then the dense layers.

    Batch norm is worth one to two points of accuracy after a few hundred steps. Pooling comes
    first, which leaves it a quarter of the pixels; ReLU commutes with pooling.
    """
    num_stages = max(2, math.ceil(math.log2(max(x.shape[1:3]) / 4)))
    for stage in range(1, num_stages + 1):
        name = f"stage{stage}"
        x = layers.Conv2D(
            min(8 * 2**stage, 128),
            3,
            padding="same",
            use_bias=False,  # batch norm would subtract it again
            kernel_initializer="he_normal",
            name=f"{name}_conv",
        )(x)
        x = layers.MaxPooling2D(2, padding="same", name=f"{name}_pool")(x)
        x = layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
        x = layers.ReLU(name=f"{name}_relu")(x)
    return _dense_stack(x, hidden_units)


# --- residual networks ---


def _cifar_resnet(x, blocks_per_stage: int):
    """ResNet of depth 6n + 2 for small images (He et al. 2015, arXiv:1512.03385, section 4.2).

    Shortcuts between stages are the paper's option A, free of parameters: every second pixel, the
    new channels zero.
    """
    x = _conv_norm(x, 16, 3, name="stem")
    for stage, filters in enumerate((16, 32, 64), start=1):
        for block in range(1, blocks_per_stage + 1):
            name = f"stage{stage}_block{block}"
            strides = 2 if stage > 1 and block == 1 else 1
            shortcut = x
            if strides == 2:
                shortcut = layers.AveragePooling2D(1, strides=2, name=f"{name}_subsample")(x)
                new_channels = filters - x.shape[-1]
                shortcut = keras.ops.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, new_channels)))
            x = _conv_norm(x, filters, 3, strides=strides, name=f"{name}_1")
            x = _conv_norm(x, filters, 3, relu=False, name=f"{name}_2")
            x = _add_relu(x, shortcut, name)
    return layers.GlobalAveragePooling2D(name="pool")(x)


def _basic_block(x, filters: int, strides: int, name: str):
    x = _conv_norm(x, filters, 3, strides=strides, name=f"{name}_1")
    return _conv_norm(x, filters, 3, relu=False, name=f"{name}_2")


def _bottleneck_block(x, filters: int, strides: int, name: str):
    # The stride sits on the 3x3 convolution ("v1.5"): on the first 1x1, as in the paper, three
    # quarters of its input are never read, which costs about half a percent of accuracy.
    x = _conv_norm(x, filters, 1, name=f"{name}_1")
    x = _conv_norm(x, filters, 3, strides=strides, name=f"{name}_2")
    return _conv_norm(x, 4 * filters, 1, relu=False, name=f"{name}_3")


def _imagenet_resnet(x, block_fn: Callable, blocks_per_stage: Sequence[int]):
    """ResNet for large images (He et al. 2015, arXiv:1512.03385, table 1), projection shortcuts."""
    x = _conv_norm(x, 64, 7, strides=2, name="stem")
    x = layers.MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(x)
    for stage, num_blocks in enumerate(blocks_per_stage, start=1):
        filters = 64 * 2 ** (stage - 1)
        for block in range(1, num_blocks + 1):
            name = f"stage{stage}_block{block}"
            strides = 2 if stage > 1 and block == 1 else 1
            residual = block_fn(x, filters, strides, name)
            if x.shape[-1] != residual.shape[-1]:
                x = _conv_norm(
                    x, residual.shape[-1], 1, strides=strides, relu=False, name=f"{name}_shortcut"
                )
            x = _add_relu(residual, x, name)
    return layers.GlobalAveragePooling2D(name="pool")(x)


# --- vision transformers ---


def _vit(x, width: int, num_heads: int, depth: int = 12):
    """Vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) in the sizes of DeiT.

    The sizes and the initialisation are those of Touvron et al. 2020, arXiv:2012.12877, without
    its distillation token; no dropout.
    """
    x = _embed_patches(x, width)
    for block in range(1, depth + 1):
        name = f"block{block}"
        y = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm1")(x)
        y = layers.MultiHeadAttention(
            num_heads, width // num_heads, kernel_initializer=_normal(), name=f"{name}_attention"
        )(y, y)
        x = layers.Add(name=f"{name}_add1")([x, y])
        y = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm2")(x)
        y = layers.Dense(
            4 * width, activation="gelu", kernel_initializer=_normal(), name=f"{name}_mlp1"
        )(y)
        y = layers.Dense(width, kernel_initializer=_normal(), name=f"{name}_mlp2")(y)
        x = layers.Add(name=f"{name}_add2")([x, y])
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    return x[:, 0]  # the class token


def _embed_patches(x, width: int):
    """Image [batch, height, width, channels] -> tokens [batch, 1 + patches, width].

    Patches are 16 pixels square, or smaller where that would leave fewer than about 64 of them (4
    pixels for a 28x28 or 32x32 image); the image is padded with zeros to whole patches. The class
    token enters as a patch of zeros, so that one linear layer with a bias per position holds the
    projection, the class token and the position embeddings: the paper's equation 1, less the two
    vectors (projection bias and class token) that position embeddings make redundant.
    """
    rows, columns, channels = x.shape[1:]
    patch = min(16, math.ceil(math.sqrt(rows * columns / 64)))
    if rows % patch or columns % patch:
        x = layers.ZeroPadding2D(((0, -rows % patch), (0, -columns % patch)), name="pad")(x)
        rows, columns = x.shape[1:3]
    grid = (rows // patch, columns // patch)
    x = layers.Reshape((grid[0], patch, grid[1], patch, channels), name="grid")(x)
    x = layers.Permute((1, 3, 2, 4, 5), name="grid_of_patches")(x)
    x = layers.Reshape((grid[0] * grid[1], patch * patch * channels), name="patches")(x)
    x = layers.ZeroPadding1D((1, 0), name="class_token")(x)
    return layers.EinsumDense(
        "btp,pd->btd",
        output_shape=(x.shape[1], width),
        bias_axes="td",
        kernel_initializer=_normal(),
        bias_initializer=_normal(),
        name="embed",
    )(x)


def _normal() -> keras.initializers.Initializer:
    # A new one for each layer: an initializer that is used again repeats its numbers.
    return keras.initializers.TruncatedNormal(stddev=0.02)


# --- keras.applications ---


def _application(name: str, function: Callable[..., keras.Model], inputs, units: int):
    """Connects an untrained architecture, its published top included, to `inputs`.

    Returns float32 [batch, units], not activated.
    """
    options = {}
    if "include_preprocessing" in inspect.signature(function).parameters:
        options["include_preprocessing"] = False
    elif function.__name__.startswith("EfficientNetB"):
        # Divides by 255 itself and cannot be told not to.
        inputs = layers.Rescaling(255.0, name="to_bytes")(inputs)
    try:
        model = function(
            weights=None,
            include_top=True,
            input_tensor=inputs,
            input_shape=tuple(inputs.shape[1:]),
            classes=units,
            classifier_activation=None,
            **options,
        )
    except ValueError as error:  # most often an image too small for the number of strides
        raise UserError(f"--model={name}: {' '.join(str(error).split())}") from error
    top = model.layers[-1]
    if isinstance(top, layers.Dense):
        return _output_layer(units)(top.input)
    # MobileNet, MobileNetV3 and ConvNeXt end in other layers.
    return layers.Activation("linear", dtype="float32", name="logits")(model.output)


_BACKBONES: dict[str, Callable] = {
    "mlp": _dense_stack,
    "cnn": _cnn,
    "resnet20": lambda x, _: _cifar_resnet(x, 3),
    "resnet56": lambda x, _: _cifar_resnet(x, 9),
    "resnet18": lambda x, _: _imagenet_resnet(x, _basic_block, (2, 2, 2, 2)),
    "resnet50": lambda x, _: _imagenet_resnet(x, _bottleneck_block, (3, 4, 6, 3)),
    "vit_tiny": lambda x, _: _vit(x, width=192, num_heads=3),
    "vit_small": lambda x, _: _vit(x, width=384, num_heads=6),
}
