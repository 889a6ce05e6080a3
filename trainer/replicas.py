"""Makes a Keras model mean the same on any number of replicas."""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from pipelines import UserError


def adapt(name: str, model: keras.Model) -> None:
    """Synchronises batch normalization and gives each replica random numbers of its own.

    Args:
      name: the model's name, for the error message.
      model: built inside the current strategy's scope.

    Raises:
      UserError: if the model was made outside of the scope.
    """
    strategy = tf.distribute.get_strategy()
    for variable in model.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise UserError(
                f"model {name!r} was made outside the strategy's scope: make it inside build()"
            )
    if strategy.num_replicas_in_sync == 1:
        return
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            _synchronise(layer)
        generator = getattr(layer, "seed_generator", None)
        if isinstance(generator, keras.random.SeedGenerator):
            _draw_per_replica(generator)


def share_keras_generator() -> Callable[[], None]:
    """Makes Keras's global random generator here; call the result in each replica.

    Keras keeps it per thread, and strategies run their replicas in threads of their own, where a
    model that draws without a seed of its own would otherwise make a new one while it is traced.
    """
    generator = seed_generator.global_seed_generator()
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        _draw_per_replica(generator)

    def share() -> None:
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, generator)

    return share


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """All layers of a model, nested ones included, without the model itself."""
    return list(model._flatten_layers(include_self=False, recursive=True))


def communicates(model: keras.Model) -> bool:
    """Whether the forward pass needs the other replicas."""
    return any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers_of(model))


def _synchronise(layer: keras.layers.BatchNormalization) -> None:
    """Lets the layer take its statistics over the global batch.

    Keras's own `synchronized` takes the variance as E[x^2] - E[x]^2, which loses digits where the
    mean is large, so that several replicas would differ from one. Deviations from the global mean
    do not.
    """
    if not hasattr(layer, "_moments"):  # not this version's way of taking them
        layer.synchronized = True
        return
    local_moments = layer._moments

    def global_moments(inputs, mask):
        context = tf.distribute.get_replica_context()
        if mask is not None or context is None:
            return local_moments(inputs, mask)
        axes = list(layer._reduction_axes)

        def global_mean(values):
            # Replicas hold equally many rows, so the mean of their means is the mean.
            return context.all_reduce(tf.distribute.ReduceOp.MEAN, tf.reduce_mean(values, axes))

        mean = global_mean(inputs)
        shape = [1 if a in axes else inputs.shape[a] for a in range(inputs.shape.rank)]
        deviations = inputs - tf.stop_gradient(tf.reshape(mean, shape))
        return mean, global_mean(tf.square(deviations))

    layer._moments = global_moments


def _draw_per_replica(generator: keras.random.SeedGenerator) -> None:
    """Lets each replica draw its own numbers while the generator's state stays equal on all.

    Keras mirrors the state, so that every replica would drop the same units of its rows.
    """
    if hasattr(generator, "per_replica"):
        return
    next_seed = generator.next

    def next_of_replica(*args, **kwargs):
        seed = next_seed(*args, **kwargs)
        context = tf.distribute.get_replica_context()
        if context is None:
            return seed
        replica = tf.cast(context.replica_id_in_sync_group, seed.dtype)
        return seed + tf.stack([replica * 7919, tf.zeros_like(replica)])

    generator.next, generator.per_replica = next_of_replica, True


def whole(variable: tf.Variable) -> tf.Variable:
    """The variable over all replicas that this one is a part of; itself if it is no part."""
    return getattr(variable.handle, "_distributed_container", lambda: variable)() or variable
