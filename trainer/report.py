"""What a run says: metrics.jsonl, TensorBoard, log lines; each step once, also after kills."""

import json
import logging
import math
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from pipelines import UserError
from trainer import events
from trainer.storage import WRITE_ERRORS, Outage, write_atomically

_log = logging.getLogger(__name__)

Row = dict[str, Any]

_SPLITS = {"samples": "eval"}  # of a tag that does not begin with it

# What the rows say beside a loss and metrics, which therefore may not be called so.
FIELDS = {
    *("split", "step", "epoch", "examples", "seconds", "examples_per_sec", "input_wait"),
    *("learning_rate", "grad_norm", "weight_norm", "update_ratio", "overflow_steps"),
    *("weights", "data", "skipped_records"),
}


class Report:
    """Writes the rows of one run.

    Rows after the step of the checkpoint that a run resumes from are taken back by `rewind`; what
    `flush` has returned from survives a kill. A disk that is full does not stop the run: rows wait
    until there is room, TensorBoard's events are given up.

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
        self._waiting: list[str] = []  # rows that could not be written yet
        self._rows_outage, self._events_outage = Outage(), Outage()

    def rewind(self, step: int, evaluated: bool = True) -> None:
        """Takes back every row and event after `step`, and a torn last one.

        Those of an evaluation at `step` itself too, unless it counts as `evaluated`.
        """
        self.close()

        def stays(split: str | None, at: int) -> bool:
            return at < step or (at == step and (evaluated or split != "eval"))

        if self._path.exists():
            kept = [row for row in self.rows() if stays(row.get("split"), row["step"])]
            write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        try:
            events.rewind(
                self.events_dir, lambda tag, at: stays(_SPLITS.get(tag, tag.partition("/")[0]), at)
            )
        except WRITE_ERRORS as error:
            self._give_up_events(error)

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
        """Writes an evaluation row in the place of one of the same data and step."""
        same = ("split", "step", "data")
        kept = [r for r in self.rows() if any(r.get(key) != row[key] for key in same)]
        write_atomically(self._path, "".join(json.dumps(r) + "\n" for r in [*kept, finite(row)]))

    def write(self, row: Row) -> None:
        """Appends a row and its TensorBoard scalars."""
        self._waiting.append(json.dumps(finite(row)) + "\n")
        self._write_rows()
        numbers = {
            f"{row['split']}/{key}": value
            for key, value in row.items()
            if isinstance(value, (int, float)) and key != "step"
        }
        self._write_events(lambda writer: writer.scalars(numbers, row["step"]))

    def image(self, tag: str, image: tf.Tensor, step: int) -> None:
        """Writes a TensorBoard image, uint8 [height, width, channels]."""
        self._write_events(lambda writer: writer.image(tag, image, step))

    def flush(self) -> None:
        """Makes sure that what was written survives."""
        if self._waiting:
            self._write_rows()
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self._rows_outage.failed(self._path, error, "its last rows may not survive")
        if self._writer is not None:
            self._write_events(lambda writer: writer.flush())

    def close(self) -> None:
        """Flushes and closes all files; writing opens them again."""
        self.flush()
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._write_events(lambda writer: writer.close())
        self._file = self._writer = None

    def check_complete(self) -> None:
        """Refuses to call a run finished whose rows are not all written.

        Raises:
          UserError: naming the file.
        """
        if self._waiting:
            raise UserError(f"{self._path}: {len(self._waiting)} rows could not be written")

    def _write_rows(self) -> None:
        """Appends the rows that wait, all or none."""
        try:
            if self._file is None:
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
            size = self._file.seek(0, os.SEEK_END)
            rest = "".join(self._waiting).encode()
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(size)
                raise
        except OSError as error:
            self._rows_outage.failed(self._path, error, "training goes on, its rows wait")
            return
        self._waiting.clear()
        self._rows_outage.succeeded(self._path)

    def _write_events(self, write: Callable[[events.EventWriter], None]) -> None:
        if not self._tensorboard:
            return
        try:
            if self._writer is None:
                self._writer = events.EventWriter(self.events_dir)
            write(self._writer)
        except WRITE_ERRORS as error:
            self._give_up_events(error)

    def _give_up_events(self, error: Exception) -> None:
        # Each further attempt would leave another empty file behind.
        self._events_outage.failed(self.events_dir, error, "this process writes no more events")
        self._tensorboard, self._writer = False, None


def refuse_fields(names: Iterable[str], what: str) -> None:
    """Refuses metrics called like a field of the rows.

    Raises:
      UserError: naming the first; `what` says where the metrics come from.
    """
    for name in names:
        if name in FIELDS:
            raise UserError(f"{what}: a metric may not be called {name!r}: rows have such a field")


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
