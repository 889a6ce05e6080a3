"""What a run says: metrics.jsonl, TensorBoard, log lines; each step once, also after kills."""

import json
import logging
import math
import os
import pathlib
from typing import Any

import tensorflow as tf

from trainer import events
from trainer.checkpoint import write_atomically

_log = logging.getLogger(__name__)

Row = dict[str, Any]


class Report:
    """Writes the rows of one run.

    Rows after the step of the checkpoint that a run resumes from are taken back by `rewind`; what
    `flush` has returned from survives a kill.

    Attributes:
      model_dir: the run's folder.
      events_dir: the folder in it for TensorBoard.
    """

    def __init__(self, model_dir: pathlib.Path, tensorboard: bool):
        self.model_dir = model_dir
        self._path = model_dir / "metrics.jsonl"
        self.events_dir = model_dir / "tensorboard"
        self._tensorboard = tensorboard
        self._writer: events.EventWriter | None = None
        self._file = None

    def rewind(self, step: int) -> None:
        """Takes back every row and event after `step`, and a torn last one."""
        self.close()
        if self._path.exists():
            kept = [row for row in self.rows() if row["step"] <= step]
            write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        events.rewind(self.events_dir, step)

    def rows(self) -> list[Row]:
        """All whole rows written so far, by this run and those it resumed."""
        rows = []
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    continue
        return [row for row in rows if isinstance(row, dict) and "step" in row]

    def replace_eval(self, row: Row) -> None:
        """Writes an evaluation row in the place of the one of the same step, if there is one."""
        kept = [r for r in self.rows() if (r["split"], r["step"]) != ("eval", row["step"])]
        write_atomically(self._path, "".join(json.dumps(r) + "\n" for r in [*kept, finite(row)]))

    def write(self, row: Row) -> None:
        """Appends a row and its TensorBoard scalars."""
        if self._file is None:
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115
        self._file.write(json.dumps(finite(row)) + "\n")
        self._file.flush()
        if self._tensorboard:
            numbers = {
                f"{row['split']}/{key}": value
                for key, value in row.items()
                if isinstance(value, (int, float)) and key != "step"
            }
            self._events().scalars(numbers, row["step"])

    def image(self, tag: str, image: tf.Tensor, step: int) -> None:
        """Writes a TensorBoard image, uint8 [height, width, channels]."""
        if self._tensorboard:
            self._events().image(tag, image, step)

    def flush(self) -> None:
        """Makes sure that what was written survives."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes all files; writing opens them again."""
        self.flush()
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()
        self._file = self._writer = None

    def _events(self) -> events.EventWriter:
        if self._writer is None:
            self._writer = events.EventWriter(self.events_dir)
        return self._writer


def finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not know, in dictionaries at any depth."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe(row: Row, total_steps: int | None = None) -> str:
    """A row as a line for people."""
    skipped = {
        "split",
        "step",
        "epoch",
        "seconds",
        "examples",
        "weights",
        "weight_norm",
        "update_ratio",
    }
    parts = [f"{row['split']:5} step {row['step']}" + (f"/{total_steps}" if total_steps else "")]
    if "epoch" in row:
        parts.append(f"epoch {row['epoch']:.2f}")
    for key, value in row.items():
        if key in skipped or not isinstance(value, (int, float)):
            continue
        text = f"{value:,.0f}" if key == "examples_per_sec" else f"{value:.4g}"
        parts.append(f"{key} {text}")
    if row["split"] == "eval":
        parts.append(f"on {row['examples']} examples")
    return "  ".join(parts)
