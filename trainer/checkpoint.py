"""Checkpoints: all state of a run as one unit, recognised when torn, never mixed with others'."""

import hashlib
import json
import logging
import os
import pathlib
import re
from typing import Any

import tensorflow as tf

from pipelines import UserError

_log = logging.getLogger(__name__)

_MANIFEST = re.compile(r"ckpt-(\d+)\.json")
_DATA = re.compile(r"ckpt-\d+\.(index|data-\d+-of-\d+)")


class CheckpointStore:
    """The checkpoints of one folder.

    A checkpoint is the TensorFlow files ckpt-<step>.* and, written last, the manifest
    ckpt-<step>.json with their sizes and SHA-256, what a resuming run must match, and the host's
    state. Without its manifest a checkpoint does not exist.
    """

    def __init__(self, folder: str | os.PathLike, max_to_keep: int):
        self.folder = pathlib.Path(folder)
        self.max_to_keep = max_to_keep

    def save(
        self,
        step: int,
        variables: dict[str, tf.Variable],
        identity: dict[str, Any],
        state: dict[str, Any],
    ) -> None:
        """Writes a checkpoint, then lets go of the oldest of its own beyond `max_to_keep`.

        Args:
          step: finished training steps.
          variables: everything a resumed run needs, by name.
          identity: what a resumed run must match.
          state: further JSON values.

        Raises:
          OSError, tf.errors.OpError: if it cannot be written; older ones are untouched.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = self.folder / f"ckpt-{step}.json"
        manifest.unlink(missing_ok=True)
        tf.train.Checkpoint(variables=dict(variables)).write(str(manifest.with_suffix("")))
        files = {path.name: _fingerprint(path) for path in self._files(step)}
        content = {"step": step, "identity": identity, "state": state, "files": files}
        write_atomically(manifest, json.dumps(content, indent=1))
        steps = self.steps()
        for old in steps[: -self.max_to_keep]:
            self._delete(old)
        kept = [f"ckpt-{s}" for s in steps[-self.max_to_keep :]]
        # What tf.train.latest_checkpoint reads.
        lines = [f'model_checkpoint_path: "{kept[-1]}"']
        lines += [f'all_model_checkpoint_paths: "{name}"' for name in kept]
        write_atomically(self.folder / "checkpoint", "\n".join(lines) + "\n")

    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending."""
        if not self.folder.is_dir():
            return []
        matches = map(_MANIFEST.fullmatch, os.listdir(self.folder))
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> dict[str, Any] | None:
        """Manifest of the newest whole checkpoint; None if there never was one.

        Raises:
          UserError: if there are checkpoints and none of them is whole.
        """
        steps = self.steps()
        for step in reversed(steps):
            manifest, damage = self._read(step)
            if damage is None:
                return manifest
            _log.warning("checkpoint %s is damaged (%s)", self.folder / f"ckpt-{step}", damage)
        if steps:
            raise UserError(
                f"none of the {len(steps)} checkpoints in {self.folder} is whole: restore them, or "
                "start in another --model_dir"
            )
        return None

    def holds_foreign_files(self) -> bool:
        """Whether there are checkpoint files without a manifest of ours."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return not self.steps() and any(_DATA.fullmatch(n) or n == "checkpoint" for n in names)

    def restore(self, step: int, variables: dict[str, tf.Variable], exact: bool = True) -> None:
        """Reads the variables of a checkpoint.

        Raises:
          UserError: if it does not hold these variables or, if `exact`, holds others.
        """
        path = self.folder / f"ckpt-{step}"
        try:
            status = tf.train.Checkpoint(variables=dict(variables)).read(str(path))
            if exact:
                status.assert_consumed()
            else:
                status.assert_existing_objects_matched()
                status.expect_partial()  # do not warn of what was left out on purpose
        except (AssertionError, ValueError, tf.errors.OpError) as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise UserError(f"checkpoint {path} belongs to another model: {reason}") from error

    def _read(self, step: int) -> tuple[dict[str, Any], str | None]:
        """(manifest, what is wrong with the checkpoint or None)."""
        try:
            manifest = json.loads((self.folder / f"ckpt-{step}.json").read_text())
            for name, expected in manifest["files"].items():
                if _fingerprint(self.folder / name) != expected:
                    return {}, f"{name} has changed"
            if manifest["step"] != step or not manifest["files"]:
                return {}, "the manifest does not belong to it"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return {}, str(error)
        return manifest, None

    def _files(self, step: int) -> list[pathlib.Path]:
        return sorted(self.folder.glob(f"ckpt-{step}.index")) + sorted(
            self.folder.glob(f"ckpt-{step}.data-*")
        )

    def _delete(self, step: int) -> None:
        for path in [self.folder / f"ckpt-{step}.json", *self._files(step)]:
            path.unlink(missing_ok=True)


def check_identity(saved: dict[str, Any], current: dict[str, Any], where: str) -> None:
    """Refuses to go on with settings that would change what the run means.

    Raises:
      UserError: naming the first setting that differs.
    """
    current = json.loads(json.dumps(current))
    for name, value in current.items():
        if name in saved and saved[name] != value:
            raise UserError(
                f"--{name}: {where} was trained with {saved[name]!r}, not {value!r}: use that, or "
                "another --model_dir"
            )


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def _fingerprint(path: pathlib.Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
