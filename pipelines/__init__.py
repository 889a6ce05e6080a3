"""Input pipelines from TensorFlow Datasets: which examples, in which order, as model-ready batches.

This is the room's whole face: `trainer` uses nothing of it that is not listed here. Names are
imported on first use, so that `--help` and a mistyped flag answer without waiting for TensorFlow.
"""

import importlib
from typing import Any

_EXPORTS = {
    "Data": "pipeline",
    "DataConfig": "config",
    "EvaluationView": "images",
    "FlagDefiner": "definer",
    "INDEX": "pipeline",
    "Pipeline": "pipeline",
    "Spec": "features",
    "UserError": "errors",
    "WEIGHT": "pipeline",
    "call_symbol": "symbols",
    "check_values": "definer",
    "cli": "cli",
    "config_from_flags": "config",
    "cutmix": "mix",
    "define_flags": "config",
    "is_symbol": "symbols",
    "load_data": "pipeline",
    "load_symbol": "symbols",
    "machine": "machine",
    "make_mix_fn": "mix",
    "mixup": "mix",
    "plots": "plots",
    "randomness": "randomness",
    "settle_types": "definer",
    "symbol_name": "symbols",
    "tables": "tables",
    "to_model_input": "features",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'pipelines' has no attribute {name!r}")
    module = importlib.import_module(f"pipelines.{_EXPORTS[name]}")
    return module if name == _EXPORTS[name] else getattr(module, name)
