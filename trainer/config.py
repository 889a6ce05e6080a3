"""The job, device, model, optimisation and bookkeeping flags, and the dataclass they become."""

import dataclasses
import math
import re

from absl import flags

from pipelines import FlagDefiner, UserError, cli, is_symbol, settle_types

MODES = ("train", "eval", "train_and_eval", "export")
STRATEGIES = ("one_device", "mirrored", "multi_worker_mirrored")
GAN_PENALTIES = ("none", "r1", "gp")
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What is trained and how. Field meanings: the help of the flag of that name."""

    mode: str = "train_and_eval"
    model_dir: str = ""
    resume: str = "auto"
    init_from: str | None = None
    seed: int = 0
    deterministic: bool = False
    summary: bool = False
    strategy: str = "mirrored"
    num_devices: int = 0
    logical_devices: int = 0
    intra_op_threads: int = 0
    mixed_precision_policy: str = "float32"
    jit_compile: str = "auto"
    task: str = "auto"
    model: str = "auto"
    loss: str | None = None
    regularizer: str | None = None
    metrics: tuple[str, ...] = ()
    callback: str | None = None
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    l2: float = 0.0
    hidden_units: tuple[int, ...] = (128,)
    freeze: str | None = None
    latent_dim: int = 64
    gan_penalty: str = "r1"
    gan_penalty_weight: float | None = None
    train_epochs: int | None = None
    train_steps: int | None = None
    steps_per_loop: int | None = None
    optimizer: str = "adam"
    learning_rate: float | None = None
    lr_schedule: str = "constant"
    lr_boundaries: tuple[int, ...] = ()
    lr_decay_rate: float | None = None
    lr_decay_steps: int | None = None
    warmup_steps: int = 0
    momentum: float | None = None
    weight_decay: float | None = None
    grad_clip_norm: float | None = None
    grad_clip_norm_per_variable: float | None = None
    grad_clip_value: float | None = None
    grad_accum_steps: int = 1
    ema_decay: float | None = None
    log_steps: int = 100
    eval_epochs: int | None = None
    eval_steps: int | None = None
    checkpoint_steps: int | None = None
    checkpoint_secs: float | None = None
    max_to_keep: int = 3
    best_metric: str | None = None
    early_stopping_patience: int | None = None
    target_metric: str | None = None
    on_nan: str = "fail"
    max_rollbacks: int = 3
    export: bool = True
    tensorboard: bool = True
    profile_steps: tuple[int, ...] = ()
    progress: str = "auto"

    def __post_init__(self):
        settle_types(self)
        for a, b in (("train_epochs", "train_steps"), ("eval_epochs", "eval_steps")):
            if getattr(self, a) is not None and getattr(self, b) is not None:
                raise UserError(f"--{a} and --{b} exclude each other: give one")
        if self.profile_steps and (
            len(self.profile_steps) != 2 or not 0 < self.profile_steps[0] <= self.profile_steps[1]
        ):
            raise UserError("--profile_steps takes first,last: two steps, counted from 1, in order")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(n, float) and not math.isfinite(n) for n in numbers):
                raise UserError(f"--{field.name}={value}: must be a finite number")
        if min(self.class_weights, default=0.0) < 0:
            given = ",".join(map(str, self.class_weights))
            raise UserError(f"--class_weights={given}: none may be negative")
        if list(self.lr_boundaries) != sorted(set(self.lr_boundaries)):
            given = ",".join(map(str, self.lr_boundaries))
            raise UserError(f"--lr_boundaries={given}: must rise from step to step")
        if self.target_metric:
            parse_target(self.target_metric)
        if self.freeze:
            try:
                re.compile(self.freeze)
            except re.error as error:
                raise UserError(
                    f"--freeze={self.freeze}: not a regular expression: {error}"
                ) from None
        if self.init_from and self.resume == "must":
            raise UserError("--init_from and --resume=must exclude each other: give one")

    @property
    def training(self) -> bool:
        """Whether the mode trains."""
        return self.mode in ("train", "train_and_eval")

    @property
    def mixes(self) -> bool:
        """Whether the task applies what --augment mixes."""
        return self.task in ("auto", "classification")

    @property
    def evaluating(self) -> bool:
        """Whether the mode evaluates."""
        return self.mode in ("eval", "train_and_eval")


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `TrainConfig` on `values`; --seed belongs to the pipeline's flags."""
    definer = FlagDefiner(values, TrainConfig())
    _define_job(definer)
    _define_devices(definer)
    _define_model(definer)
    _define_optimisation(definer)
    _define_bookkeeping(definer)


def parse_target(text: str) -> tuple[str, str, float]:
    """Splits 'name>=value' or 'name<=value'.

    Raises:
      UserError: if it is neither.
    """
    match = re.fullmatch(r"\s*(\S+?)\s*(>=|<=)\s*([-+.\deE]+)\s*", text)
    try:
        return match[1], match[2], float(match[3])
    except (TypeError, ValueError):
        raise UserError(f"--target_metric={text}: must be name>=value or name<=value") from None


def _define_job(f: FlagDefiner) -> None:
    f.choice("mode", MODES, "What to do; eval and export read the newest checkpoint.")
    f.string("model_dir", "Folder of the run (empty: a new one under runs/).")
    f.choice(
        "resume",
        ("auto", "never", "must"),
        "auto: go on from the newest checkpoint in --model_dir if there is one; never: refuse a "
        "folder that holds checkpoints; must: refuse one that holds none.",
    )
    f.string("init_from", "Checkpoint (its path without suffix) or .keras file to start from.")
    f.boolean("deterministic", "TensorFlow's op determinism too; the data order is exact anyway.")
    f.boolean("summary", "Print the model's layers.")


def _define_devices(f: FlagDefiner) -> None:
    f.choice("strategy", STRATEGIES, "How to distribute training.")
    f.integer("num_devices", "Devices to use (0: all visible).", lower=0)
    f.integer(
        "logical_devices",
        "Split each physical device into this many, to try distribution without GPUs (0: do not).",
        lower=0,
    )
    f.integer(
        "intra_op_threads",
        "Threads of one operation on the CPU (0: 1 for an mlp of at most 32 hidden units a layer, "
        "where handing work over costs more than it saves; else as many as cores).",
        lower=0,
    )
    f.choice("mixed_precision_policy", POLICIES, "Keras dtype policy of the model.")
    f.choice(
        "jit_compile",
        ("auto", "true", "false"),
        "XLA: with one replica it compiles the whole loop of steps, with several the forward and "
        "backward pass. auto decides and logs.",
    )


def _define_model(f: FlagDefiner) -> None:
    f.string("task", "auto, classification, regression, gan, or module:Class.")
    f.string(
        "model",
        "auto, mlp, cnn, resnet20, vit_tiny, a keras.applications name, or module:function.",
    )
    f.string("loss", "Keras loss name, or module:function called with (labels, outputs).")
    f.string("regularizer", "module:function called with the model, returning a scalar penalty.")
    f.items("metrics", "Extra metrics, module:function called with (labels, outputs) -> [batch].")
    f.string("callback", "module:function called with (event, loop) at begin, step and end.")
    f.number("label_smoothing", "Share of the label's weight spread over all classes.", upper=1.0)
    f.items("class_weights", "Weight of each class in the loss, one number per class.")
    f.number("l2", "L2 penalty: this times the sum of squares of all kernels.")
    f.items("hidden_units", "Units of each hidden dense layer of --model=mlp and cnn.")
    f.string("freeze", "Regular expression: layers whose path it finds are not trained.")
    f.integer("latent_dim", "Numbers from which --task=gan generates an image.")
    f.choice(
        "gan_penalty",
        GAN_PENALTIES,
        "On the discriminator's gradient by its input: r1 at real images, gp between real and "
        "generated ones.",
    )
    f.number("gan_penalty_weight", "Weight of --gan_penalty (default: 1 for r1, 10 for gp).")


def _define_optimisation(f: FlagDefiner) -> None:
    f.integer("train_epochs", "Epochs to train in total (default 5).")
    f.integer("train_steps", "Optimizer updates to train in total, instead of --train_epochs.")
    f.integer("steps_per_loop", "Most steps in one compiled call (default: about half a second).")
    f.string("optimizer", "keras.optimizers name, or module:function called with the rate.")
    f.number("learning_rate", "Peak learning rate (default: the optimizer's own).")
    f.string(
        "lr_schedule",
        "constant, cosine, linear, piecewise, exponential, or module:function called with "
        "(learning_rate, total_steps), of the steps after --warmup_steps.",
    )
    f.items("lr_boundaries", "Steps at which piecewise drops (default: at 1/2 and 3/4 of them).")
    f.number("lr_decay_rate", "Factor of a piecewise drop (0.1) or of --lr_decay_steps (0.96).")
    f.integer("lr_decay_steps", "Steps of one exponential decay (default: an epoch).")
    f.integer("warmup_steps", "Steps of a linear rise from 0 before the schedule.", lower=0)
    f.number("momentum", "Momentum, where the optimizer has one (default: its own).", upper=1.0)
    f.number("weight_decay", "Decoupled weight decay of kernels; bias and norm are left alone.")
    f.number("grad_clip_norm", "Largest global norm of the reduced gradient.", lower=1e-30)
    f.number(
        "grad_clip_norm_per_variable", "Largest norm of each variable's gradient.", lower=1e-30
    )
    f.number("grad_clip_value", "Largest magnitude of a gradient entry.", lower=1e-30)
    f.integer("grad_accum_steps", "Parts in which a batch passes through the model.")
    f.number(
        "ema_decay", "Average weights with this decay; evaluation and export use them.", upper=1.0
    )


def _define_bookkeeping(f: FlagDefiner) -> None:
    f.integer("log_steps", "Steps between train rows.")
    f.integer("eval_epochs", "Epochs between evaluations (default 1).")
    f.integer("eval_steps", "Steps between evaluations, instead of --eval_epochs.")
    f.integer(
        "checkpoint_steps",
        "Steps between checkpoints (default: each epoch, at most one a second).",
    )
    f.number(
        "checkpoint_secs",
        "Seconds between checkpoints, beside --checkpoint_steps (default: none; 0: each call).",
    )
    f.integer("max_to_keep", "Checkpoints to keep; the best is kept apart.")
    f.string(
        "best_metric",
        "Evaluation metric that chooses the best checkpoint: the highest, or the lowest where its "
        "name holds loss, mse, mae, error or perplexity, or the task says so.",
    )
    f.integer(
        "early_stopping_patience", "Evaluations without a better --best_metric after which to stop."
    )
    f.string("target_metric", "name>=value or name<=value: stop when an evaluation reaches it.")
    f.choice("on_nan", ("fail", "rollback"), "What to do when loss or gradient are not finite.")
    f.integer("max_rollbacks", "Rollbacks of --on_nan=rollback before the run fails.")
    f.boolean("export", "Write export/ at the end of training.")
    f.boolean("tensorboard", "Write TensorBoard event files.")
    f.items(
        "profile_steps", "first,last: steps to profile into tensorboard/, from 1, both included."
    )
    f.choice(
        "progress",
        ("auto", "true", "false"),
        "Whether to draw a progress bar; auto: on a terminal.",
    )


_ITEM_TYPES = {
    "class_weights": float,
    "hidden_units": int,
    "lr_boundaries": int,
    "metrics": str,
    "profile_steps": int,
}


_SUPERVISED_TASKS = ("auto", "classification", "regression")
_SUPERVISED = ("loss", "label_smoothing", "class_weights", "l2", "regularizer", "metrics")


def config_from_flags(values: flags.FlagValues) -> TrainConfig:
    """Reads the flags that `define_flags` and the pipeline's `define_flags` defined.

    Raises:
      UserError: for values that cannot be honoured.
    """
    fields = {f.name: getattr(values, f.name) for f in dataclasses.fields(TrainConfig)}
    for name, kind in _ITEM_TYPES.items():
        try:
            fields[name] = tuple(kind(item) for item in fields[name])
        except ValueError:
            given = ",".join(fields[name])
            raise UserError(f"--{name}={given}: must be {kind.__name__}s, with commas") from None
    config = TrainConfig(**fields)
    _refuse_unused(values, config)
    return config


def _refuse_unused(values: flags.FlagValues, config: TrainConfig) -> None:
    """A flag that this run would ignore is an error, not a surprise."""
    has_labels = config.task != "gan"
    makes_model = has_labels or config.model == "auto" or is_symbol(config.model)
    needs = {
        "model": (makes_model, "a task that learns labels, unless it is module:function"),
        "hidden_units": (
            has_labels and config.model in ("auto", "mlp", "cnn"),
            "--model=mlp or cnn",
        ),
        **dict.fromkeys(_SUPERVISED, (has_labels, "a task that learns labels")),
        "lr_boundaries": (config.lr_schedule == "piecewise", "--lr_schedule=piecewise"),
        "lr_decay_steps": (config.lr_schedule == "exponential", "--lr_schedule=exponential"),
        "lr_decay_rate": (
            config.lr_schedule in ("piecewise", "exponential"),
            "--lr_schedule=piecewise or exponential",
        ),
        "max_rollbacks": (config.on_nan == "rollback", "--on_nan=rollback"),
        "early_stopping_patience": (config.mode != "train", "an evaluation, not --mode=train"),
        "target_metric": (config.mode != "train", "an evaluation, not --mode=train"),
        "best_metric": (config.mode != "train", "an evaluation, not --mode=train"),
        "eval_epochs": (config.mode != "train", "an evaluation, not --mode=train"),
        "eval_steps": (config.mode != "train", "an evaluation, not --mode=train"),
        "latent_dim": (config.task not in _SUPERVISED_TASKS, "--task=gan"),
        "gan_penalty": (config.task not in _SUPERVISED_TASKS, "--task=gan"),
        "gan_penalty_weight": (
            config.task not in _SUPERVISED_TASKS and config.gan_penalty != "none",
            "--task=gan and --gan_penalty=r1 or gp",
        ),
    }
    for name, (used, what) in needs.items():
        if cli.changed(values, name) and not used:
            given = values[name].value
            given = ",".join(given) if isinstance(given, list) else given
            raise UserError(f"--{name}={given}: only has a meaning with {what}")
