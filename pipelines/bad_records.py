"""What happens to records that cannot be used: the run ends naming one, or goes on without them."""

import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from pipelines.errors import UserError

_log = logging.getLogger(__name__)

_EXCEPTION = re.compile(r"[A-Za-z_.]*(Error|Exception)\b: ")

BAD = "_bad"  # bool [m] in a reader's examples: the row is a stand-in and must not count

FAILURES = (tf.errors.OpError, UnicodeDecodeError)  # the latter: of a message with bytes

Examples = dict[str, tf.Tensor]


class BadRecords:
    """The unusable records of one split met so far.

    Attributes:
      skip: whether they are left out; otherwise the first one ends the run.
      failure: the error that ended it, for whoever receives TensorFlow's version of it.
    """

    def __init__(self, skip: bool, where: Callable[[int], str], num_examples: int):
        """`where(position)` names a record's shard and number."""
        self.skip, self.failure = skip, None
        self._where, self._num_examples = where, num_examples
        self._positions: set[int] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._positions)

    def note(self, position: int, reason: str) -> None:
        """Counts and logs a record once.

        Raises:
          UserError: if bad records are not to be skipped, or no good one is left.
        """
        told = f"{self._where(position)}: {reason}"
        with self._lock:
            if not self.skip:
                self.failure = UserError(f"{told}; --on_bad_record=skip trains without it")
                raise self.failure
            is_new = position not in self._positions
            self._positions.add(position)
        if is_new:
            _log.warning("skipping %s", told)
        self._check_any_left(told)

    def note_missing(self, positions: range, reason: str) -> None:
        """The same for a run of records, logged as one."""
        if not self.skip:
            raise UserError(f"{reason}; --on_bad_record=skip trains on the others")
        self._positions.update(positions)
        _log.warning("skipping %d records: %s", len(positions), reason)
        self._check_any_left(reason)

    def _check_any_left(self, reason: str) -> None:
        if len(self._positions) == self._num_examples:
            self.failure = UserError(
                f"none of the split's {self._num_examples} records can be used, the last: {reason}"
            )
            raise self.failure

    def note_extra(self, reason: str) -> None:
        """A file holds more records than can be asked for."""
        if not self.skip:
            raise UserError(f"{reason}; --on_bad_record=skip trains without the others")
        _log.warning("%s: the others are left out", reason)

    def settle(
        self,
        examples: Examples,
        bad: tf.Tensor,
        positions: tf.Tensor,
        reason: str,
        values: tf.Tensor | None = None,
    ) -> Examples:
        """Graph code: notes the rows that are `bad` (bool [m]) and marks them under `BAD`.

        In `reason` each row's own of `values` ([m, ...]) takes the place of "{}".
        """
        values = positions if values is None else values

        def note_all(bad, positions, values):
            for position, value in zip(positions[bad].tolist(), values[bad], strict=True):
                self.note(position, reason.format(value))
            return True

        noted = tf.cond(
            tf.reduce_any(bad),
            lambda: tf.numpy_function(note_all, [bad, positions, values], tf.bool),
            lambda: tf.constant(True),
        )
        with tf.control_dependencies([noted]):
            examples = {key: tf.identity(tensor) for key, tensor in examples.items()}
        if self.skip:
            examples[BAD] = examples.get(BAD, tf.zeros_like(bad)) | bad
        return examples


def explain(error: Exception, what: str, bad: BadRecords | None) -> UserError:
    """Turns what TensorFlow makes of an error in a pipeline back into the one line it is about.

    Args:
      error: what iterating raised, one of `FAILURES`.
      what: names the data that was read.
      bad: its bad records.
    """
    if bad is not None and bad.failure:
        return bad.failure
    # Of an exception in a user's function, its own line is in the middle of a traceback.
    lines = str(getattr(error, "message", error)).splitlines() or [type(error).__name__]
    line = next((line for line in lines if _EXCEPTION.match(line)), lines[0])
    return UserError(f"{what}: {line[:500]}")


def guarded(fn: Callable, inputs: tuple[tf.Tensor, ...], types: dict[str, tf.TensorSpec]):
    """Calls `fn` on a whole batch and, only if that fails, on each example alone.

    Args:
      fn: graph code from tensors [m, ...] to a dictionary of tensors [m, ...].
      inputs: tensors [m, ...] with m known.
      types: types of one example of the result.

    Returns:
      (fn's result, with zeros for the examples on which it fails; bool [m], whether it fails).
    """
    size = inputs[0].shape[0]

    def whole(*inputs):
        return fn(*inputs), tf.zeros([size], tf.bool)

    def one_by_one(*inputs):
        dtypes = [*(t.dtype for t in types.values()), tf.bool]
        *values, failed = tf.numpy_function(_RowByRow(fn, inputs, types), inputs, dtypes)
        shaped = {
            key: tf.ensure_shape(value, [size, *t.shape])
            for (key, t), value in zip(types.items(), values, strict=True)
        }
        return shaped, tf.ensure_shape(failed, [size])

    inputs = tf.data.Dataset.from_tensors(inputs)
    attempts = inputs.map(whole).ignore_errors().concatenate(inputs.map(one_by_one))
    options = tf.data.Options()  # to rewrite a graph of one element would only take time
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return attempts.take(1).with_options(options).get_single_element()


class _RowByRow:
    """Applies graph code to each row of a batch alone; traced only once there is a bad one."""

    def __init__(
        self, fn: Callable, inputs: tuple[tf.Tensor, ...], types: dict[str, tf.TensorSpec]
    ):
        rows = [tf.TensorSpec([1, *tensor.shape[1:]], tensor.dtype) for tensor in inputs]
        self._fn = tf.function(fn, input_signature=rows, autograph=False)
        self._types = types

    def __call__(self, *inputs: np.ndarray) -> list[np.ndarray]:
        """Values of `types`, zeros for rows on which it fails; and bool [m], where it does."""
        size = len(inputs[0])
        failed = np.zeros(size, bool)
        values = {
            key: np.full(
                (size, *t.shape), b"" if t.dtype == tf.string else 0, t.dtype.as_numpy_dtype
            )
            for key, t in self._types.items()
        }
        for i in range(size):
            try:
                for key, value in self._fn(*(array[i : i + 1] for array in inputs)).items():
                    values[key][i] = value.numpy()[0]
            except FAILURES:
                failed[i] = True
        return [*values.values(), failed]


def trusted(
    make_fn: Callable[[bool, int], tf.data.Dataset], what: str, bad: BadRecords | None
) -> Iterator:
    """Elements of a dataset whose records are trusted until one fails.

    To be ready to rescue costs time at the start and in each batch, where to begin anew, once, is
    cheap.

    Args:
      make_fn: called with whether to rescue and how many elements to leave out.
      what: names the data that is read.
      bad: its bad records.

    Raises:
      UserError: for what fails in spite of the rescue.
    """
    taken = 0
    for rescue in (True,) if bad else (False, True):
        try:
            for element in make_fn(rescue, taken):
                yield element
                taken += 1
            return
        except FAILURES as error:
            if rescue:
                raise explain(error, what, bad) from error


# How datasets from outside TensorFlow are written: a variant tensor, its inputs, its types.


class Trusting(tf.data.Dataset):
    """A dataset that, iterated in Python, is `trusted`; what is made of it rescues from the start.

    Only what is needed of the two is traced, for that takes time.
    """

    def __init__(self, make_fn, what: str, bad: BadRecords | None):
        self._arguments = make_fn, what, bad
        super().__init__(None)

    def __iter__(self):
        return trusted(*self._arguments)

    @functools.cached_property
    def _dataset(self) -> tf.data.Dataset:
        return self._arguments[0](True, 0)

    @property
    def _variant_tensor(self):
        return self._dataset._variant_tensor

    @property
    def element_spec(self):
        return self._dataset.element_spec

    def _inputs(self):
        return []


class Explained(tf.data.Dataset):
    """A dataset that, iterated in Python, raises `explain`ed errors."""

    def __init__(self, dataset: tf.data.Dataset, what: str, bad: BadRecords | None):
        self._dataset, self._what, self._bad = dataset, what, bad
        super().__init__(dataset._variant_tensor)

    def __iter__(self):
        return _ExplainedIterator(iter(self._dataset), self._what, self._bad)

    @property
    def element_spec(self):
        return self._dataset.element_spec

    def _inputs(self):
        return [self._dataset]


class _ExplainedIterator:
    def __init__(self, iterator, what: str, bad: BadRecords | None):
        self._iterator, self._what, self._bad = iterator, what, bad

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self._iterator)
        except FAILURES as error:
            raise explain(error, self._what, self._bad) from error
