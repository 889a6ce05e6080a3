"""Training on tf.data pipelines with a compiled GradientTape step.

From Python: `trainer.run(trainer.TrainConfig(...), pipelines.DataConfig(...))`; a task of one's own
subclasses `trainer.Task`. Names are imported on first use, so that flags answer quickly.
"""

import importlib
from typing import Any

_EXPORTS = {
    "Task": "trainer.tasks",
    "TrainConfig": "trainer.config",
    "make_model": "trainer.tasks",
    "run": "trainer.job",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
