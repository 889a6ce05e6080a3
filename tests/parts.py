"""Models, losses, augmentations and callbacks, named on the command line as parts:name."""

import collections
import os
import signal
import subprocess
import time

import keras
import numpy as np
import tensorflow as tf

from trainer import models
from trainer.tasks import Task
from trainer.tasks.supervised import Classification

layers = keras.layers

# Models.


def _net(spec, *stack):
    # Named, so that variables have the same paths in every run of a process.
    return keras.Sequential([keras.Input(spec.input_shape), *stack], name="net")


def line(spec):
    """One weight, 1, no bias: the reference problem's model."""
    return _net(spec, _ones())


def line_l2(spec):
    """The same with a penalty of w^2."""
    return _net(spec, _ones(kernel_regularizer=keras.regularizers.L2(1.0)))


def _ones(**options):
    return layers.Dense(1, use_bias=False, kernel_initializer="ones", name="line", **options)


def linear(spec):
    """Predictions or logits linear in the input."""
    return _net(spec, layers.Flatten(), layers.Dense(spec.num_classes or 1, name="out"))


def normed(spec):
    """Batch norm and an L2 penalty, nothing random."""
    l2 = keras.regularizers.L2(0.01)
    return _net(
        spec,
        layers.Flatten(),
        # No bias: batch norm takes it out again, so that its gradient is nothing but rounding.
        layers.Dense(6, use_bias=False, kernel_regularizer=l2, name="hidden"),
        layers.BatchNormalization(momentum=0.8, name="norm"),
        layers.ReLU(),
        layers.Dense(spec.num_classes or 1, name="out"),
    )


def conv(spec):
    """Convolution, batch norm and dropout: everything that makes a resume hard."""
    return _net(
        spec,
        layers.Conv2D(4, 3, name="conv"),
        layers.BatchNormalization(name="norm"),
        layers.ReLU(),
        layers.Flatten(),
        layers.Dropout(0.3, name="drop"),
        layers.Dense(spec.num_classes, name="out"),
    )


def smooth_resnet(spec):
    """ResNet-20 without kinks: within rounding of one, a unit's gradient may go either way."""

    def smooth(layer):
        if isinstance(layer, layers.ReLU):
            return layers.Activation("swish", name=layer.name)
        return type(layer).from_config(layer.get_config())

    return keras.models.clone_model(models.build_model("resnet20", spec), clone_function=smooth)


class Subclassed(keras.Model):
    """A model without `get_config` or `compute_output_shape`."""

    def __init__(self, units):
        super().__init__(name="subclassed")
        self.dense = layers.Dense(units)

    def call(self, inputs):
        return self.dense(inputs)


def subclassed(spec):
    """What Keras can run and not write to a .keras file."""
    return Subclassed(spec.num_classes)


class InNumpy(layers.Layer):
    """A layer that XLA cannot compile."""

    def call(self, inputs):
        return tf.ensure_shape(tf.numpy_function(np.array, [inputs], tf.float32), inputs.shape)


def in_numpy(spec):
    """Logits linear in what goes through numpy."""
    return _net(spec, InNumpy(), layers.Dense(spec.num_classes, name="out"))


def dropped(spec):
    """Adds up its inputs, of which half are dropped."""
    return _net(spec, layers.Dropout(0.5, name="drop"), _ones())


class Noise(layers.Layer):
    """Adds noise from Keras's own generator, which no layer owns, and multiplies by another."""

    def call(self, inputs, training=False):
        if not training:
            return inputs
        return inputs + keras.random.normal(inputs.shape[1:])


def dense_dropout(spec):
    """Small, with dropout."""
    return _net(
        spec,
        layers.Dense(8, activation="relu", name="hidden"),
        layers.Dropout(0.3, name="drop"),
        layers.Dense(spec.num_classes, name="out"),
    )


def noisy(spec):
    """A model that draws at random in all the ways of Keras."""
    return _net(
        spec,
        layers.GaussianNoise(0.1),
        layers.RandomFlip(),
        layers.Flatten(),
        layers.AlphaDropout(0.2),
        Noise(),
        layers.Dense(spec.num_classes, name="out"),
    )


def two_outputs(spec):
    """Of the wrong output shape wherever there are not two classes."""
    return _net(spec, layers.Flatten(), layers.Dense(2))


def two_heads(spec):
    """With two outputs, where the tasks at hand know one."""
    inputs = keras.Input(spec.input_shape)
    return keras.Model(inputs, [layers.Dense(3)(inputs), layers.Dense(3)(inputs)])


def named_outputs(spec):
    """With outputs in a dictionary."""
    inputs = keras.Input(spec.input_shape)
    return keras.Model(inputs, {"logits": layers.Dense(3)(inputs)})


def wrong_input(spec):
    """For inputs of another shape."""
    return keras.Sequential([keras.Input((7,)), layers.Dense(3)])


READY_MADE = {}


def ready_made(spec):
    """A model that somebody made earlier."""
    return READY_MADE["model"]


def not_a_model(spec):
    """Something else than a Keras model."""
    return "a model"


def plain_sgd(learning_rate):
    """An optimizer function."""
    return keras.optimizers.SGD(learning_rate)


def slow_sgd(learning_rate):
    """An optimizer with another rate than --learning_rate."""
    return keras.optimizers.SGD(learning_rate * 0.01)


def rising(learning_rate, total_steps):
    """A schedule function: the rate times the step."""
    return keras.optimizers.schedules.PolynomialDecay(
        0.0, total_steps, end_learning_rate=learning_rate * total_steps
    )


def not_a_schedule(learning_rate, total_steps):
    """Something else than a schedule or a rate."""
    return "cosine"


def not_an_optimizer(learning_rate):
    """Something else than an optimizer."""
    return "an optimizer"


def broken_model(spec):
    """A model function with a mistake in it."""
    raise ValueError("no such layer here")


# Losses, metrics, regularizers.


def squared(labels, outputs):
    """(label - output)^2 of each example."""
    return tf.square(tf.cast(labels, tf.float32) - outputs[:, 0])


def mean_squared(labels, outputs):
    """The mistake of returning the batch's mean."""
    return tf.reduce_mean(squared(labels, outputs))


def not_finite(labels, outputs, step):
    """NaN from the fifth step on."""
    return squared_logits(outputs) + tf.where(step < 4, 0.0, np.nan)


def not_finite_once(labels, outputs, step):
    """NaN in the fifth step, the first time."""

    def once(step):
        if step != 4 or "failed" in PROBE:
            return np.float32(0)
        PROBE["failed"] = True
        return np.float32(np.nan)

    return squared_logits(outputs) + tf.reshape(tf.numpy_function(once, [step], tf.float32), [])


def squared_logits(outputs):
    """A loss that needs no label."""
    return tf.reduce_sum(tf.square(outputs), axis=1)


def broken_loss(labels, outputs):
    """A loss with a mistake in it."""
    raise ValueError("no such term here")


def overflows_once(labels, outputs, step):
    """Too large for a loss scale in the second step, for the labels of the second half alone."""
    too_large = tf.logical_and(tf.equal(step, 1), labels >= 18)
    return 0.01 * squared(labels, outputs) * tf.where(too_large, 1e37, 1.0)


def skips_once(labels, outputs, step):
    """The same loss, constant in the second step."""
    return 0.01 * squared(labels, outputs) * tf.where(tf.equal(step, 1), 0.0, 1.0)


def nothing(labels, outputs):
    """A loss of 0 with a gradient of 0."""
    return tf.reduce_sum(outputs, axis=1) * 0.0


def step_and_weight(labels, outputs, model, step):
    """A loss that uses all that is offered."""
    weight = model.trainable_variables[0][0, 0]
    return outputs[:, 0] * 0.0 + tf.cast(step, tf.float32) + weight


def absolute(labels, outputs):
    """A metric: |label - output|."""
    return tf.abs(tf.cast(labels, tf.float32) - outputs[:, 0])


def mean_error(labels, outputs):
    """The mistake of a metric that returns the batch's mean."""
    return tf.reduce_mean(outputs)


def penalties(model):
    """The mistake of a regularizer that returns one penalty per weight."""
    return tf.square(model.trainable_variables[0])


def class_number(labels, outputs):
    """A metric that depends on the labels alone."""
    return tf.cast(labels, tf.float32)


def step(labels, outputs):
    """A metric with the name of a field of the rows."""
    return class_number(labels, outputs)


def accuracy(labels, outputs):
    """A metric with the name of one that is there already."""
    return class_number(labels, outputs)


def not_a_number(labels, outputs):
    """A metric that is NaN."""
    return outputs[:, 0] * np.nan


def slow_loss(labels, outputs):
    """A step of 10 ms."""
    loss = squared_logits(outputs)
    return loss + _sleeping(0.01, loss)


def slow_evaluation(labels, outputs):
    """A metric that takes 0.3 s in evaluations, whose batches are of 11."""
    errors = tf.cast(labels, tf.float32) * 0.0
    return _sleeping(0.3, errors) if labels.shape[0] == 11 else errors


def _sleeping(secs, like):
    def sleep(values):
        time.sleep(secs)
        return np.zeros_like(values)

    return tf.ensure_shape(tf.numpy_function(sleep, [like], tf.float32), like.shape)


def terminates(labels, outputs):
    """A metric that sends SIGTERM to the run when it evaluates, in batches of 11."""
    errors = tf.cast(labels, tf.float32) * 0.0
    if labels.shape[0] != 11 or os.environ.get("NO_TERMINATION"):
        return errors

    def send(errors):
        os.kill(os.getpid(), signal.SIGTERM)
        return errors

    return tf.ensure_shape(tf.numpy_function(send, [errors], tf.float32), errors.shape)


def weight_squared(model):
    """A regularizer: the square of the model's only weight."""
    return tf.reduce_sum(tf.square(model.trainable_variables[0]))


def no_penalty(model):
    """A regularizer that takes the model's own penalties out again."""
    return -tf.add_n(model.losses)


# What the compiled step sees, told to the test. Works in one process and without XLA.

SEEN = collections.defaultdict(dict)  # step -> replica -> values


def seen():
    """step -> values of the whole batch, in the order of the replicas; forgets them."""
    found = {s: np.concatenate([parts[r] for r in sorted(parts)]) for s, parts in SEEN.items()}
    SEEN.clear()
    return found


def sees_labels(labels, outputs, step):
    """A loss of 0 that notes the labels of each replica's rows, step by step."""
    return _noting(labels, outputs, step)


def sees_outputs(labels, outputs, step):
    """A loss of 0 that notes the model's outputs."""
    return _noting(outputs[:, 0], outputs, step)


def _noting(values, outputs, step):
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group

    def note(step, replica, values):
        SEEN[int(step)][int(replica)] = values.copy()
        return np.float32(0)

    zero = tf.numpy_function(note, [step, replica, values], tf.float32)
    return outputs[:, 0] * 0.0 + tf.reshape(zero, [])


# Augmentations.


def draw(example, seed):
    """An augmentation that puts what it drew into the label: id + a number in [0, 1)."""
    noise = tf.random.stateless_uniform([], seed)
    return {**example, "y": tf.floor(example["y"]) + noise * 0.9}


def numpy_noise(example, seed):
    """An augmentation in numpy, which forgets shapes."""

    def add(x, seed):
        return x + np.random.default_rng(abs(seed)).normal(size=x.shape).astype(np.float32)

    return {**example, "x": tf.numpy_function(add, [example["x"], seed], tf.float32)}


def slow(example, seed):
    """An augmentation of 5 ms an example."""
    return {**example, "x": example["x"] + _sleeping(0.005, example["x"])}


def other_type(example, seed):
    """The mistake of returning another type, which the dataset's would truncate."""
    return {**example, "y": tf.cast(example["y"], tf.float32) * 0.5}


def other_shape(example, seed):
    """The mistake of returning another shape."""
    return {**example, "x": example["x"][:1]}


def forgets_entries(example, seed):
    """The mistake of returning a part of the example."""
    return {"x": example["x"]}


# Callbacks.

PROBE = {}


def probe(event, loop):
    """Keeps what the beginning and the end of training look like, on every replica."""
    task = loop.task
    if event == "begin":
        PROBE["initial"] = [v.numpy() for v in task.models["model"].variables]
    if event != "end":
        return
    variables = [v for model in task.models.values() for v in model.variables]
    for update in task.updates:
        variables += update.optimizer.variables
    # By place and name: Keras numbers the optimizers of a process in their paths.
    PROBE["copies"] = {f"{i}.{v.name}": copies(v.value) for i, v in enumerate(variables)}
    PROBE["iterations"] = [int(update.optimizer.iterations.numpy()) for update in task.updates]
    PROBE["model"] = task.models["model"]
    PROBE["traces"] = loop.stepper._train.experimental_get_tracing_count()


def spoils_weights(event, loop):
    """Makes the weights NaN after the second step."""
    if event == "step" and loop.step == 2:
        for variable in loop.task.models["model"].trainable_variables:
            variable.assign(variable * np.nan)


def fails_at_step(event, loop):
    if event == "step":
        raise KeyError("no such thing")


def counting(event, loop):
    """Keeps the names of all events."""
    PROBE.setdefault("events", []).append(event)


def copies(variable):
    """The value on each replica."""
    strategy = tf.distribute.get_strategy()
    return [value.numpy() for value in strategy.experimental_local_results(variable)]


def dawdle(event, loop):
    """Makes a run long enough to be killed in the middle."""
    time.sleep(0.02)


def terminate_at_step_7(event, loop):
    """Sends SIGTERM to the run; step 7 must end a call, as with --steps_per_loop=1."""
    if event == "step" and loop.step == 7:
        os.kill(os.getpid(), signal.SIGTERM)


def interrupt_twice_at_step_7(event, loop):
    """Ctrl-C from a person without patience; step 7 must end a call."""
    if event == "step" and loop.step == 7:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second Ctrl-C did not end the process")


def dies(event, loop):
    """Kills the run at what DIE_AT names: an event, or the first step from a number on."""
    at = os.environ.get("DIE_AT")
    if at == event or (event == "step" and (at or "").isdigit() and loop.step >= int(at)):
        os.kill(os.getpid(), signal.SIGKILL)


def dies_evaluating(labels, outputs):
    """A metric of 0 that kills the run when it evaluates, in batches of 11, if DIE_AT says so."""
    errors = tf.cast(labels, tf.float32) * 0.0
    if labels.shape[0] != 11:
        return errors

    def die(errors):
        if os.environ.get("DIE_AT") == "evaluation":
            os.kill(os.getpid(), signal.SIGKILL)
        return errors

    return tf.ensure_shape(tf.numpy_function(die, [errors], tf.float32), errors.shape)


def fills_disk(event, loop):
    """Leaves the disk of the run's folder full from FILL_AT to FREE_AT: steps, or "end"."""
    now = loop.step if event == "step" else event
    filling = loop.report.model_dir / "filling"
    if str(now) == os.environ["FREE_AT"]:
        filling.unlink()
    if str(now) == os.environ["FILL_AT"]:
        fill(filling)


def fill(path):
    """Writes a file until there is no room for another byte."""
    with open(path, "wb", buffering=0) as handle:
        for size in (4096, 1):
            try:
                while handle.write(bytes(size)):
                    pass
            except OSError:
                pass


def makes_read_only(event, loop):
    """Makes the folder of checkpoints read-only, for root too, from step 12 on."""
    folder = str(loop.report.model_dir / "checkpoints")
    if event == "step" and loop.step == 12 and not os.path.ismount(folder):
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)


def tells_listening_ports(event, loop):
    """Prints how many ports the process listens on."""
    if event != "end":
        return
    inodes = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as rows:
            inodes |= {row.split()[9] for row in list(rows)[1:] if row.split()[3] == "0A"}
    own = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]]
    print("listening on", sum(link == f"socket:[{i}]" for link in own for i in inodes), "ports")


def watches_itself(event, loop):
    """Keeps memory, open files and traces at every 1000th step."""
    if event == "step" and loop.step % 1000 == 0:
        with open("/proc/self/statm") as numbers:
            pages = int(numbers.read().split()[1])
        traces = loop.stepper._train.experimental_get_tracing_count()
        seen = (loop.step, pages, len(os.listdir("/proc/self/fd")), traces)
        PROBE.setdefault("watched", []).append(seen)


# Tasks.


class Unexported(Classification):
    export = Task.export


class Centred(Classification):
    """Takes from the inputs their running mean, a variable of its own."""

    def build(self):
        super().build()
        self.mean = tf.Variable(tf.zeros(self.spec.input_shape), trainable=False)

    def prepare(self, batch, training):
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(self.inputs(batch), axis=0))
        return batch

    def outputs(self, batch, training):
        return self.model(self.inputs(batch) - self.mean, training=training)

    def finish_evaluation(self, metrics):
        return {**metrics, "exp_loss": np.exp(np.float32(metrics["loss"]))}


class FailsToBuild(Task):
    """A task with a mistake in it."""

    def build(self):
        raise ValueError("no such part here")
