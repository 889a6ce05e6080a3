"""The embedded dataset: 5,000 MNIST digits as a TFDS builder that needs no network.

`Mnist5k` reads `mnist_5k.npz`, which is installed next to this module, and writes an ordinary
prepared TFDS dataset of two splits: `train` (4,000 examples) and `test` (1,000), the ten digits
equally frequent in both.

NOTICE. The data file is a subset of the MNIST database of handwritten digits by Yann LeCun, Corinna
Cortes and Christopher J.C. Burges, which is available under the Creative Commons
Attribution-ShareAlike 3.0 licence (https://creativecommons.org/licenses/by-sa/3.0/). Changes made:
500 images of each digit were selected and stored, pixels unaltered, in one compressed numpy
archive. The data file and what this builder prepares from it stay under that licence; the code is
under the licence of this package.
"""

import importlib.resources
import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

_DATA_FILE = "mnist_5k.npz"
_IMAGE_SHAPE = (28, 28, 1)
_NUM_CLASSES = 10
# The last examples of every class, in file order, that make the test split.
_TEST_EXAMPLES_PER_CLASS = 100

_DESCRIPTION = """\
5,000 images of the MNIST database of handwritten digits (28x28 pixels, grey, 500 of each digit)
with a fixed, stratified split: 400 of each digit for training and 100 for testing. A small stand-in
for MNIST that needs no download; accuracies are not comparable with those on the official test set.

MNIST is by Yann LeCun, Corinna Cortes and Christopher J.C. Burges and is available under the
Creative Commons Attribution-ShareAlike 3.0 licence.
"""

_CITATION = """\
@misc{lecun1998mnist,
  title  = {The {MNIST} database of handwritten digits},
  author = {LeCun, Yann and Cortes, Corinna and Burges, Christopher J. C.},
  year   = {1998},
  note   = {Licensed under CC BY-SA 3.0},
}
"""


# Not registered under its name: the registry refuses a second class of the same name, so importing
# this module again (importlib.reload, a copy of the package) would fail, and what `tfds.builder`
# finds would depend on what happened to be imported. It is reached by its class.
class Mnist5k(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Builder of `mnist_5k`.

    One example is `{"image": uint8 [28, 28, 1], "label": int64 []}`, the pixels from 0 (background)
    to 255 (full ink), the label the digit. The supervised keys are `("image", "label")`.

    The split: within each class, in the order of the data file, the first 400 examples are `train`
    and the last 100 are `test`. Neighbours in the file are often digits of one writer. Cutting each
    class once keeps them on one side, where an interleaved or random choice would test on the
    handwriting it trained on (a nearest-neighbour classifier is then right for 93.8% of the
    held-out images instead of 92.8%, averaged over many such cuts).

    On disk TFDS orders the examples of a split by a hash of their keys, the same on every machine,
    so that a slice such as `train[90%:]` holds all classes although the data file is sorted.

    Preparing does not start TensorFlow's runtime, so devices can still be configured afterwards.

    Raises (from `download_and_prepare`):
      FileNotFoundError: the data file was not installed with the package.
    """

    name = "mnist_5k"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "First version."}

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(
                        shape=_IMAGE_SHAPE, dtype=np.uint8, encoding_format="png"
                    ),
                    "label": tfds.features.ClassLabel(num_classes=_NUM_CLASSES),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://yann.lecun.com/exdb/mnist/",
            citation=_CITATION,
            license="CC BY-SA 3.0",
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager  # Nothing to download.
        images, labels = _load()
        is_test = _test_mask(labels)
        return {
            "train": self._generate_examples(images, labels, np.flatnonzero(~is_test)),
            "test": self._generate_examples(images, labels, np.flatnonzero(is_test)),
        }

    def _generate_examples(
        self, images: np.ndarray, labels: np.ndarray, indices: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields `(position in the data file, example)` for each position in `indices`, int [n]."""
        for index in indices.tolist():
            # An array TFDS would encode with an eager TensorFlow op, which starts the runtime on
            # every device it sees and takes three times as long; encoded bytes it writes as given.
            yield (
                index,
                {"image": io.BytesIO(_encode_png(images[index])), "label": int(labels[index])},
            )


def _load() -> tuple[np.ndarray, np.ndarray]:
    """Returns the data file's images, uint8 [5000, 28, 28, 1], and labels, uint8 [5000]."""
    resource = importlib.resources.files(__package__).joinpath(_DATA_FILE)
    with np.load(io.BytesIO(resource.read_bytes()), allow_pickle=False) as arrays:
        return arrays["image"], arrays["label"]


def _test_mask(labels: np.ndarray) -> np.ndarray:
    """Returns bool [n]: whether each of `labels`, int [n], is among the last of its class."""
    mask = np.zeros(labels.shape, dtype=bool)
    for label in range(_NUM_CLASSES):
        mask[np.flatnonzero(labels == label)[-_TEST_EXAMPLES_PER_CLASS:]] = True
    return mask


def _encode_png(image: np.ndarray) -> bytes:
    """Returns `image`, uint8 [height, width, 1], as an 8-bit greyscale PNG file.

    The format is that of https://www.w3.org/TR/png/: signature, IHDR, one IDAT, IEND.
    """
    height, width, _ = image.shape
    # Greyscale of depth 8; default compression and filter methods; not interlaced.
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    # Each row is preceded by its filter type, 0: none.
    rows = np.pad(image[:, :, 0], ((0, 0), (1, 0))).tobytes()
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(payload))
        + kind
        + payload
        + struct.pack(">I", zlib.crc32(kind + payload))
        for kind, payload in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    )
