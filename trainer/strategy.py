"""Devices and the distribution strategy over them."""

import functools
import logging
import os
import pathlib

import keras
import tensorflow as tf

from pipelines import UserError
from trainer.config import TrainConfig

_log = logging.getLogger(__name__)

_MAX_SMALL_UNITS = 32


def set_up_process(config: TrainConfig) -> None:
    """Sets what is global to the process: devices, precision, determinism.

    Must come before anything touches a device. May be called again, as long as it asks for the same
    devices.

    Raises:
      UserError: if the devices cannot be set up as asked.
    """
    check_keras_backend()
    _set_threads(config)
    _split_devices(config.logical_devices)
    keras.config.set_floatx("float32")
    keras.config.set_image_data_format("channels_last")
    keras.mixed_precision.set_dtype_policy(config.mixed_precision_policy)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()


def check_keras_backend() -> None:
    """Refuses a Keras that runs on something else than TensorFlow."""
    if keras.config.backend() != "tensorflow":
        raise UserError(
            f"Keras uses the backend {keras.config.backend()!r} (KERAS_BACKEND or "
            f"{pathlib.Path('~/.keras/keras.json').expanduser()}); this package needs 'tensorflow'"
        )


def _set_threads(config: TrainConfig) -> None:
    """Limits the threads of an operation, where asked to or where more would not help.

    The loop of a 784-10-10 network made 9,200 steps per CPU second with one thread, 6,400 with two.
    Several replicas on a CPU fill its cores anyway; and where they compete for threads, some
    convolutions round differently from run to run, so that resuming would not be exact.
    """
    threads = config.intra_op_threads
    small = config.model == "mlp" and max(config.hidden_units, default=0) <= _MAX_SMALL_UNITS
    several = config.logical_devices > 1 and config.num_devices != 1
    if not threads and (small or several) and not tf.config.list_physical_devices("GPU"):
        threads = 1
    if threads and threads != tf.config.threading.get_intra_op_parallelism_threads():
        try:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
        except RuntimeError as error:  # this process has its threads already
            if config.intra_op_threads:
                raise UserError(
                    f"--intra_op_threads={threads}: this process already runs with other threads, "
                    "which cannot be changed"
                ) from error


def _split_devices(count: int) -> None:
    """Splits each physical device into `count` logical ones; lets GPU memory grow otherwise."""
    gpus = tf.config.list_physical_devices("GPU")
    try:
        if count:
            for device in gpus or tf.config.list_physical_devices("CPU"):
                tf.config.set_logical_device_configuration(device, _parts(device, count))
        else:
            for device in gpus:
                tf.config.experimental.set_memory_growth(device, True)
    except RuntimeError as error:  # this process has its devices already
        expected = (count or 1) * max(1, len(gpus))
        if len(_devices()) < expected or (count and len(_devices()) != expected):
            raise UserError(
                f"--logical_devices={count}: this process already runs with {len(_devices())} "
                "devices, which cannot be changed"
            ) from error


def _parts(device, count: int) -> list[tf.config.LogicalDeviceConfiguration]:
    if device.device_type == "CPU":
        return [tf.config.LogicalDeviceConfiguration()] * count
    free = tf.config.experimental.get_device_details(device).get("memory_limit", 0)
    limit = int(free * 0.9) // count >> 20 if free else 1024 * 4
    return [tf.config.LogicalDeviceConfiguration(memory_limit=limit)] * count


def _devices() -> list[str]:
    """Names of the logical devices to train on: GPUs if there are any, else CPUs."""
    logical = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in logical]


def make_strategy(config: TrainConfig) -> tf.distribute.Strategy:
    """The strategy that the flags ask for, over devices that exist.

    Raises:
      UserError: if more devices are asked for than exist.
    """
    available = _devices()
    if config.strategy == "multi_worker_mirrored":
        raise UserError(
            "--strategy=multi_worker_mirrored: not available yet; choose one_device or mirrored"
        )
    if config.num_devices > len(available):
        raise UserError(
            f"--num_devices={config.num_devices}: this machine has {len(available)}: "
            f"{', '.join(available)}"
        )
    if config.strategy == "one_device" and config.num_devices > 1:
        raise UserError(
            f"--strategy=one_device uses one device, not --num_devices={config.num_devices}"
        )
    count = 1 if config.strategy == "one_device" else config.num_devices or len(available)
    return _strategy(config.strategy, tuple(available[:count]))


@functools.cache
def _strategy(kind: str, devices: tuple[str, ...]) -> tf.distribute.Strategy:
    # One strategy per device set and process: each numbers its collectives from the same start, so
    # that a second one over the same devices can meet the first one's shapes.
    if kind == "one_device":
        return tf.distribute.OneDeviceStrategy(devices[0])
    return tf.distribute.MirroredStrategy(
        list(devices), cross_device_ops=_cross_device_ops(devices)
    )


def _cross_device_ops(devices: tuple[str, ...]) -> tf.distribute.CrossDeviceOps | None:
    """Reduction on one device for CPUs and for parts of one GPU; TensorFlow's choice otherwise.

    NCCL knows neither; the default over CPUs is slower, and breaks for a second model in a process.
    """
    cpu = "CPU" in devices[0]
    shared = len(devices) > len(tf.config.list_physical_devices("GPU"))
    return tf.distribute.ReductionToOneDevice() if cpu or shared else None


def describe_devices(strategy: tf.distribute.Strategy) -> list[str]:
    """The device on which each replica really keeps its variables, such as 'CPU:0'."""
    with strategy.scope():
        probe = tf.Variable(0.0)
    replicas = strategy.experimental_local_results(probe)
    return [os.path.basename(r.device).replace("device:", "") for r in replicas]


def check_batch_size(devices: tf.distribute.Strategy, batch_size: int, num_parts: int) -> None:
    """Refuses a batch that replicas, and the parts each accumulates over, cannot share evenly.

    Raises:
      UserError: naming the numbers.
    """
    replicas = devices.num_replicas_in_sync
    if batch_size % (replicas * num_parts):
        raise UserError(
            f"--batch_size={batch_size} cannot be split evenly over {replicas} replicas"
            + (f" x {num_parts} accumulation steps" if num_parts > 1 else "")
        )
