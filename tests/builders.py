"""Tiny datasets, named on the command line as builders:Name; they prepare in a tenth of a second.

Examples lie on disk in the order of their numbers, so that an example's `id` is its position.
"""

import io
import os
import signal

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

F = tfds.features


def builder(name, features, row_fn, splits, keys=("x", "y")):
    """A builder class whose split of n examples holds `row_fn(0), ..., row_fn(n - 1)`.

    `row_fn` may also take the split's name, as a second argument.
    """
    takes_split = row_fn.__code__.co_argcount == 2

    class Rows(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self,
                features=F.FeaturesDict(features),
                supervised_keys=keys,
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager):
            def rows(split, size):
                return ((i, row_fn(i, split) if takes_split else row_fn(i)) for i in range(size))

            return {split: rows(split, size) for split, size in splits.items()}

        def _generate_examples(self):
            raise NotImplementedError  # the generators above stand for it

    Rows.name = name
    return Rows


def _draw(i, shape, salt=0):
    """Numbers that depend on the example alone, float32."""
    return np.random.default_rng([i, salt]).normal(size=shape).astype(np.float32)


def _picture(i, shape=(8, 8, 1), top=255, dtype=np.uint8):
    """A picture of class i % 3: a third of the rows bright, over noise."""
    picture = np.random.default_rng([i, 7]).uniform(0, 0.4, shape)
    rows = np.array_split(np.arange(shape[0]), 3)[i % 3]
    picture[rows] += 0.6
    return (picture * top).astype(dtype)


_LINE = {"x": F.Tensor(shape=(1,), dtype=np.float32), "y": F.Scalar(dtype=np.float32)}
_VECTOR = {"x": F.Tensor(shape=(4,), dtype=np.float32), "y": F.ClassLabel(num_classes=3)}
_IMAGE = {
    "image": F.Image(shape=(8, 8, 1), encoding_format="png"),
    "label": F.ClassLabel(num_classes=3),
}
_BOTH = ("image", "label")


def _labelled(i):
    return {"x": _draw(i, (4,)) + i % 3, "y": i % 3}


# The reference problem: one weight w = 1, loss mean((w x)^2), x = 1, 2, 3, 4, three times over so
# that three replicas can share it.
Reference = builder(
    "reference",
    _LINE,
    lambda i: {"x": [i % 4 + 1.0], "y": 0.0},
    {"train": 12, "test": 4},
)
Line = builder(
    "line",
    _LINE,
    lambda i: {"x": _draw(i, (1,)), "y": float(_draw(i, (1,))[0] * 3 + 1)},
    {"train": 31, "test": 11},
)
# Every example says which one it is.
Ids = builder(
    "ids",
    {"x": F.Tensor(shape=(3,), dtype=np.float32), "id": F.Scalar(dtype=np.int64)},
    lambda i: {"x": _draw(i, (3,)), "id": i},
    {"train": 31, "test": 11},
    keys=("x", "id"),
)
Numbered = builder(
    "numbered",
    _LINE,
    lambda i: {"x": _draw(i, (1,)), "y": float(i)},
    {"train": 24, "test": 4},
)
# Two ones at the end, in a batch of their own when batches are of 4.
TailOfOnes = builder(
    "tail_of_ones",
    _LINE,
    lambda i: {"x": [1.0 * (i >= 8)], "y": 0.0},
    {"train": 10, "test": 10},
)
Vectors = builder("vectors", _VECTOR, _labelled, {"train": 31, "test": 11})
Many = builder("many", _VECTOR, _labelled, {"train": 48, "test": 1003})
# One example whose sums overflow in half precision.
Spiky = builder(
    "spiky",
    _VECTOR,
    lambda i, split: {
        "x": _labelled(i)["x"] * np.float32(1e6 if (i, split) == (7, "train") else 1),
        "y": i % 3,
    },
    {"train": 30, "test": 11},
)
Images = builder(
    "images",
    _IMAGE,
    lambda i: {"image": _picture(i), "label": i % 3},
    {"train": 90, "test": 33},
    keys=_BOTH,
)
Colours16 = builder(
    "colours16",
    {
        "image": F.Image(shape=(8, 6, 3), dtype=np.uint16, encoding_format="png"),
        "label": F.ClassLabel(num_classes=3),
    },
    lambda i: {"image": _picture(i, (8, 6, 3), 65535, np.uint16), "label": i % 3},
    {"train": 24, "test": 9},
    keys=_BOTH,
)
Wide = builder(
    "wide",
    {
        "image": F.Image(shape=(12, 16, 3), encoding_format="jpeg"),
        "label": F.ClassLabel(num_classes=3),
    },
    lambda i: {"image": _picture(i, (12, 16, 3)), "label": i % 3},
    {"train": 24, "test": 12},
    keys=_BOTH,
)
_SIZES = ((16, 16), (9, 12), (20, 47), (150, 70), (70, 151), (130, 131))


def _of_its_own_size(i):
    """PNG and JPEG in turns."""
    picture = _picture(i, (*_SIZES[i // 2 % len(_SIZES)], 3))
    encode = tf.io.encode_jpeg if i % 2 else tf.io.encode_png
    return {"image": io.BytesIO(encode(picture).numpy()), "label": i % 3}


Sizes = builder(
    "sizes",
    {
        "image": F.Image(shape=(None, None, 3), encoding_format="png"),
        "label": F.ClassLabel(num_classes=3),
    },
    _of_its_own_size,
    {"train": 12, "test": 12},
    keys=_BOTH,
)
SortedByClass = builder(
    "sorted_by_class",
    _VECTOR,
    lambda i: {"x": _draw(i, (4,)), "y": i // 100},
    {"train": 300, "test": 30},
)


def _perishable(i):
    """The same as of `Vectors`; making the example that DIE_AT names kills the process."""
    if os.environ.get("DIE_AT") == f"example {i}":
        os.kill(os.getpid(), signal.SIGKILL)
    return _labelled(i)


Perishable = builder("perishable", _VECTOR, _perishable, {"train": 48, "test": 11})

# What must be refused.
TrainOnly = builder("train_only", _VECTOR, _labelled, {"train": 20})
OneExample = builder("one_example", _VECTOR, _labelled, {"train": 1})
EmptyTest = builder("empty_test", _VECTOR, _labelled, {"train": 20, "test": 0})
NoKeys = builder(
    "no_keys",
    {"a": F.Scalar(dtype=np.float32), "b": F.Scalar(dtype=np.float32)},
    lambda i: {"a": float(i), "b": float(i)},
    {"train": 8, "test": 4},
    keys=None,
)
UnlabelledTest = builder(
    "unlabelled_test",
    _VECTOR,
    lambda i, split: {"x": _draw(i, (4,)), "y": -1 if split == "test" else i % 3},
    {"train": 12, "test": 6},
)
NotFiniteTargets = builder(
    "not_finite_targets",
    _LINE,
    lambda i: {"x": [1.0], "y": float("nan") if i == 5 else 1.0},
    {"train": 12, "test": 4},
)
Words = builder(
    "words",
    {"text": F.Text(), "label": F.ClassLabel(num_classes=2)},
    lambda i: {"text": f"word {i}", "label": i % 2},
    {"train": 8, "test": 4},
    keys=("text", "label"),
)
Ragged = builder(
    "ragged",
    {"x": F.Sequence(np.float32), "y": F.ClassLabel(num_classes=2)},
    lambda i: {"x": [1.0] * (i % 3 + 1), "y": i % 2},
    {"train": 8, "test": 4},
)
AnySize = builder(
    "any_size",
    {"image": F.Image(shape=(None, None, 3)), "label": F.ClassLabel(num_classes=2)},
    lambda i: {"image": np.zeros((4 + i, 5, 3), np.uint8), "label": i % 2},
    {"train": 8, "test": 4},
    keys=_BOTH,
)
FourChannels = builder(
    "four_channels",
    {
        "image": F.Image(shape=(4, 4, 4), encoding_format="png"),
        "label": F.ClassLabel(num_classes=2),
    },
    lambda i: {"image": np.zeros((4, 4, 4), np.uint8), "label": i % 2},
    {"train": 8, "test": 4},
    keys=_BOTH,
)


class Configured(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Vectors of as many numbers as the config says."""

    name = "configured"
    VERSION = tfds.core.Version("2.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in ("two", "five")]

    def _info(self):
        size = {"two": 2, "five": 5}[self.builder_config.name]
        features = {"x": F.Tensor(shape=(size,), dtype=np.float32), "y": _VECTOR["y"]}
        return tfds.core.DatasetInfo(
            builder=self, features=F.FeaturesDict(features), supervised_keys=("x", "y")
        )

    def _split_generators(self, dl_manager):
        size = self.info.features["x"].shape
        return {"train": ((i, {"x": _draw(i, size), "y": i % 3}) for i in range(12))}

    def _generate_examples(self):
        raise NotImplementedError


class Failing(Reference, skip_registration=True):
    """Its examples cannot be made."""

    name = "failing"

    def _split_generators(self, dl_manager):
        raise ValueError("the source of this dataset is broken")


def not_a_builder():
    """Something else than a builder class."""
