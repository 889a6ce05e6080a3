"""TensorFlow's own account of a pipeline, as rewritten: an experimental API behind one function."""

import time

import tensorflow as tf
from absl import logging as absl_logging

_SECS = 0.5
_MIN_ELEMENTS = 48  # so that those prepared ahead and never taken hardly matter


def node_costs(dataset: tf.data.Dataset, examples_per_element: int) -> dict[str, float] | None:
    """Thread time that each node of the rewritten graph spends on an example.

    Thread time is not CPU time: where cores are short it includes the wait for one.

    Args:
      dataset: endless, as training uses it.
      examples_per_element: examples in one of its elements.

    Returns:
      Node name -> microseconds per example, nodes of one name added up; None if this TensorFlow
      cannot tell.
    """
    try:
        iterator = iter(_with_model(dataset))
        start, elements = time.perf_counter(), 0
        while elements < _MIN_ELEMENTS or time.perf_counter() - start < _SECS:
            next(iterator)
            elements += 1
        model = tf.data.experimental.get_model_proto(iterator)
    except (AttributeError, tf.errors.NotFoundError, tf.errors.UnimplementedError):
        return None
    costs = {}
    for node in model.nodes.values():
        costs[node.name] = costs.get(node.name, 0.0) + node.processing_time / 1e3
    examples = elements * examples_per_element
    return {name: micros / examples for name, micros in costs.items() if micros}


def _with_model(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same dataset with autotuning, which is what makes TensorFlow keep the account."""
    options = tf.data.Options()
    options.autotune.enabled = True
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)  # it warns of the change that is meant
    try:
        return dataset.with_options(options)
    finally:
        absl_logging.set_verbosity(verbosity)
