"""The readers that leave examples on disk: records are read when their turn comes."""

import tensorflow as tf

from pipelines.bad_records import Examples
from pipelines.decode import Decoder
from pipelines.records import Records

# Reading is short beside decoding, and holds Python's lock for part of it: few calls ahead do.
INDEXED_CALLS = 2
STREAM_CALLS = 1  # a window in use, a window ahead


class DiskReader:
    """Examples of one split in TFRecord or ArrayRecord files.

    What distinguishes `indexed` from `stream` is the order they are asked for: in any order, each
    record is a read of its own; in an order of windows (`Order.window`), each block is.

    Attributes:
      num_examples: examples in the split.
      types: types of one example.
      bad: records that turned out unusable.
      read_calls: reads worth doing ahead of decoding, in parallel.
      calls_per_core: calls of the map worth running in parallel.
    """

    calls_per_core = 2

    def __init__(self, name: str, records: Records, decoder: Decoder):
        self.name, self.types, self.bad = name, decoder.types, records.bad
        self.num_examples = records.num_examples
        self.read_calls = STREAM_CALLS if name == "stream" else INDEXED_CALLS
        self._records, self._decoder = records, decoder

    def read(self, positions: tf.Tensor) -> Examples:
        """Raw records for int64 [m] positions; graph code."""
        return {"record": self._records.tensor(positions)}

    def decode(
        self, raw: Examples, positions: tf.Tensor, seeds: tf.Tensor, rescue: bool
    ) -> Examples:
        """Examples [m, ...] of what `read` returned; graph code."""
        return self._decoder.decode(raw["record"], positions, seeds, rescue)
