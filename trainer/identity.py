"""What a run must share with the checkpoint that it goes on from; the rest may be given anew."""

import json
from typing import Any

from pipelines import Data, DataConfig, UserError, symbol_name
from trainer.config import TrainConfig

_OF_MODEL = ("task", "model", "hidden_units", "mixed_precision_policy", "ema_decay", "latent_dim")
_OF_TRAINING = (
    *_OF_MODEL,
    *("gan_penalty", "gan_penalty_weight"),
    *("loss", "regularizer", "label_smoothing", "class_weights", "l2", "freeze"),
    *("optimizer", "momentum", "weight_decay"),
    *("lr_schedule", "lr_boundaries", "lr_decay_rate", "lr_decay_steps", "warmup_steps"),
    *("grad_clip_norm", "grad_clip_norm_per_variable", "grad_clip_value"),
)
_OF_DATA = (
    *("train_split", "input_key", "label_key", "image_size", "augment", "seed"),
    *("batch_size", "shuffle", "drop_remainder"),
)


def of_flags(config: TrainConfig, data_config: DataConfig) -> dict[str, Any]:
    """As far as the flags tell: JSON values by the flags' names."""
    names = _OF_TRAINING if config.training else _OF_MODEL
    if config.ema_decay is not None:  # the optimizer holds the averages
        names = (*names, "optimizer")
    identity = {name: symbol_name(getattr(config, name)) for name in names}
    if config.training:
        identity |= {name: getattr(data_config, name) for name in _OF_DATA}
        identity["augment"] = [symbol_name(name) for name in data_config.augment]
        # A checkpoint between two rows holds the sums of these metrics.
        identity["metrics"] = [symbol_name(name) for name in config.metrics]
    return identity


def of_run(config: TrainConfig, data_config: DataConfig, data: Data) -> dict[str, Any]:
    """All of it, once a run that trains has its data."""
    return {
        **of_flags(config, data_config),
        "dataset": f"{data.name}:{data.version}",
        # What several flags come to.
        "training examples (--train_split, --eval_split, --mode)": data.train.num_examples,
        "shuffle window (--reader, --shuffle_window)": data.train.order.window or "none",
    }


def check(saved: dict[str, Any], current: dict[str, Any], where: str) -> None:
    """Refuses to go on with settings that would change what the run means.

    Raises:
      UserError: naming the first setting that differs.
    """
    current = json.loads(json.dumps(current))
    for name, value in current.items():
        if name in saved and saved[name] != value:
            what = name if "(" in name else f"--{name}"
            raise UserError(
                f"{what}: {where} was trained with {saved[name]!r}, not {value!r}: use that, or "
                "another --model_dir"
            )
