"""The memory reader of images that vary in size, held decoded."""

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from pipelines import images, resources
from pipelines.bad_records import BadRecords, Examples, Explained
from pipelines.decode import SHAPE, Decoder
from pipelines.memory import MemoryReader, empty, host_tensor

_STARTS, _REDUCIBLE = "_starts", "_reducible"
_JPEG_MAGIC = b"\xff\xd8\xff"


class Levels:
    """Where the pixels of images lie in one flat array.

    A JPEG large enough to be shown at 1/2, 1/4 or 1/8 of its size is held at these sizes as well,
    so that it looks as if decoded at that size.

    Attributes:
      reducible: bool [n], whether an image has such levels.
      counts: int32 [n], levels held of an image.
      starts: int64 [n, 4], the first value of each level held.
      size: values of all images.
    """

    def __init__(self, encoded: np.ndarray, shapes: np.ndarray, decoder: Decoder):
        """Takes encoded images (bytes [n] as objects) and their heights and widths [n, 2]."""
        image = decoder.types[decoder.input_key]
        jpeg = [data.startswith(_JPEG_MAGIC) for data in encoded]
        self.reducible = np.array(jpeg, bool) & (image.dtype == tf.uint8)
        ratios = np.array(images.REDUCTIONS)
        spare = (shapes // np.array(decoder.view.size)).min(1)
        held = (spare[:, None] >= ratios) & self.reducible[:, None] | (ratios == 1)
        self.counts = held.sum(1, dtype=np.int32)
        sides = -(-shapes[:, None].astype(np.int64) // ratios[:, None])
        sizes = (sides.prod(2) * held * image.shape[-1]).reshape(-1)
        self.size = int(sizes.sum())
        self.starts = (np.cumsum(sizes) - sizes).reshape(held.shape)


class PixelReader:
    """Examples whose images are held decoded, each in its own size.

    Attributes: as of `MemoryReader`.
    """

    name, read_calls, calls_per_core = "memory", 0, 1

    def __init__(self, arrays, levels: Levels, pixels: np.ndarray, decoder: Decoder, bad):
        """Takes arrays of the other features and of `SHAPE`, and the pixels `levels` places."""
        arrays = {**arrays, _STARTS: levels.starts, _REDUCIBLE: levels.reducible}
        self._held, self._pixels = MemoryReader(arrays, bad), host_tensor(pixels)
        self._view, self._key, self.types = decoder.view, decoder.input_key, decoder.types
        self.num_examples, self.bad = self._held.num_examples, bad
        self.read = self._held.read

    def decode(
        self, raw: Examples, positions: tf.Tensor, seeds: tf.Tensor, rescue: bool
    ) -> Examples:
        """Cuts and resizes the images of what `read` returned; graph code."""
        del positions, rescue  # whose records are known to be good
        raw, image = dict(raw), self.types[self._key]
        shapes, starts, reducible = (raw.pop(key) for key in (SHAPE, _STARTS, _REDUCIBLE))
        windows = self._view.windows(shapes, seeds)
        reductions = images.reductions(windows, self._view.size)
        held = tf.where(reducible, reductions, 1)
        starts = tf.gather(starts, images.log2(held), axis=1, batch_dims=1)
        widths = -(-shapes[:, 1] // held)

        def one(row):
            start, width, window, mirror, rest = row
            y, x, height, shown = tf.unstack(window, num=4)
            stride = tf.cast(width, tf.int64) * image.shape[-1]
            first = start + tf.cast(y, tf.int64) * stride
            lines = self._pixels[first : first + tf.cast(height, tf.int64) * stride]
            lines = tf.reshape(lines, tf.stack([height, width, image.shape[-1]]))
            return images.show(images.shrink(lines[:, x : x + shown], rest), mirror, image)

        mirrored = self._view.mirrored(seeds)
        rows = (starts, widths, windows // held[:, None], mirrored, reductions // held)
        raw[self._key] = tf.map_fn(one, rows, fn_output_signature=image, parallel_iterations=1)
        return raw


def decode_all(
    encoded: np.ndarray, levels: Levels, decoder: Decoder, bad: BadRecords, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """Decodes every level of every image.

    Returns:
      (the pixels, [levels.size]; bool [n], the images that cannot be decoded).

    Raises:
      UserError: for a bad record that is not to be skipped.
    """
    image = decoder.types[decoder.input_key]
    held, counts = host_tensor(encoded), host_tensor(levels.counts)

    @tf.autograph.experimental.do_not_convert
    def decode(i):
        return i, images.decode_levels(held[i], counts[i], image.shape[-1], image.dtype)

    size, calls = len(encoded), resources.num_cores()
    pixels = empty((levels.size,), image.dtype.as_numpy_dtype)
    ends = np.append(levels.starts[1:, 0], levels.size)
    failed = np.ones(size, bool)
    # What cannot be decoded is left out, which here, unlike in a batch, shifts nothing.
    dataset = tf.data.Dataset.range(size).map(decode, num_parallel_calls=calls).ignore_errors()
    dataset = dataset.with_options(resources.dataset_options(calls))
    dataset = Explained(dataset, split, bad)
    bar = tqdm(total=size, desc=f"decoding {split}", delay=2, disable=None)
    with bar:
        for i, values in dataset.as_numpy_iterator():
            failed[i] = len(values) != ends[i] - levels.starts[i, 0]
            if not failed[i]:
                pixels[levels.starts[i, 0] : ends[i]] = values
            bar.update()
    for i in np.flatnonzero(failed):
        pixels[levels.starts[i, 0] : ends[i]] = 0
    return pixels, failed
