"""Checkpoints: all state of a run as one unit, recognised when torn, never mixed with others'."""

import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
from typing import Any

import tensorflow as tf

from pipelines import UserError
from trainer.storage import WRITE_ERRORS, write_atomically

_log = logging.getLogger(__name__)

_MANIFEST = re.compile(r"ckpt-(\d+)\.json")
_DATA = re.compile(r"ckpt-(\d+)\.(index|data-\d+-of-\d+)")


class CheckpointStore:
    """The checkpoints of one folder.

    A checkpoint is the TensorFlow files ckpt-<step>.* and, written last, the manifest
    ckpt-<step>.json with their sizes and SHA-256, what a resuming run must match, the host's state,
    and the SHA-256 of all this. Without its manifest a checkpoint does not exist.
    """

    def __init__(self, folder: str | os.PathLike, max_to_keep: int):
        self.folder = pathlib.Path(folder)
        self.max_to_keep = max_to_keep
        self.protected: int | None = None  # a step that stays beside those

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
        try:
            self._write(step, variables, {"step": step, "identity": identity, "state": state})
        except WRITE_ERRORS:
            self._discard(step)  # a full disk needs the space
            raise
        # Later ones are damaged, or the run would have gone on from them: they take no one's place.
        earlier = [s for s in self.steps() if s <= step and s != self.protected]
        for old in earlier[: -self.max_to_keep]:
            self._delete(old)
        self.list_up_to(step)

    def forget_after(self, step: int) -> None:
        """Deletes those after `step`, of a course that the run has left."""
        later = [s for s in self.steps() if s > step]
        for left in later:
            self._delete(left)
        if self.steps() and later:
            self.list_up_to(step)
        elif later:
            (self.folder / "checkpoint").unlink(missing_ok=True)

    def settle(self, step: int | None) -> None:
        """Keeps, and protects from now on, the checkpoint of `step`, if there is one, alone."""
        self.protected = step
        if step in self.steps():
            for other in self.steps():
                if other != step:
                    self._delete(other)
            self.list_up_to(step)

    def list_up_to(self, newest: int) -> None:
        """Writes the list that `tf.train.latest_checkpoint` reads, without later ones.

        Raises:
          OSError: if it cannot be written.
        """
        kept = [f"ckpt-{step}" for step in self.steps() if step <= newest]
        lines = [f'model_checkpoint_path: "{kept[-1]}"']
        lines += [f'all_model_checkpoint_paths: "{name}"' for name in kept]
        write_atomically(self.folder / "checkpoint", "\n".join(lines) + "\n")

    def _write(self, step: int, variables: dict[str, tf.Variable], content: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = self.folder / f"ckpt-{step}.json"
        manifest.unlink(missing_ok=True)
        for left in self.folder.glob("ckpt-[0-9]*_temp"):  # by a process killed in the next line
            shutil.rmtree(left)
        tf.train.Checkpoint(variables=dict(variables)).write(str(manifest.with_suffix("")))
        content["files"] = {path.name: _fingerprint(path) for path in self._files(step)}
        write_atomically(manifest, json.dumps(_signed(content), indent=1))

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
        without = self._steps_without_manifest()
        for step in sorted({*steps, *without}, reverse=True):
            manifest, damage = self._read(step)
            if damage is None:
                return manifest
            if step in without:
                damage = "it has no manifest: not written to the end, or a file is gone"
            _log.warning("checkpoint %s is damaged (%s)", self.folder / f"ckpt-{step}", damage)
        if steps:
            raise UserError(
                f"none of the {len(steps)} checkpoints in {self.folder} is whole: restore them, or "
                "start in another --model_dir"
            )
        if (self.folder / "checkpoint").exists():  # written after the first manifest
            raise UserError(
                f"{self.folder} holds checkpoints, none with its manifest ckpt-<step>.json: not "
                "written by this package, or no longer whole; start in another --model_dir"
            )
        return None

    def _steps_without_manifest(self) -> set[int]:
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        found = {int(match[1]) for match in map(_DATA.fullmatch, names) if match}
        return found.difference(self.steps())

    def holds_foreign_files(self) -> bool:
        """Whether there are checkpoint files without a manifest of ours."""
        return bool(not self.steps() and self._steps_without_manifest())

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
            manifest = json.loads((self.folder / f"ckpt-{step}.json").read_bytes())
            if manifest.pop("sha256") != _signed(manifest)["sha256"]:
                return {}, "its manifest has changed"
            for name, expected in manifest["files"].items():
                if _fingerprint(self.folder / name) != expected:
                    return {}, f"{name} has changed"
            if manifest["step"] != step or not manifest["files"]:
                return {}, "the manifest does not belong to it"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return {}, str(error)
        return manifest, None

    def _files(self, step: int) -> list[pathlib.Path]:
        return sorted(self.folder.glob(f"ckpt-{step}.index")) + sorted(
            self.folder.glob(f"ckpt-{step}.data-*")
        )

    def _discard(self, step: int) -> None:
        """Takes back what was written of a checkpoint, as far as the disk lets it."""
        shutil.rmtree(self.folder / f"ckpt-{step}_temp", ignore_errors=True)
        try:
            self._delete(step)
        except OSError:
            pass

    def _delete(self, step: int) -> None:
        for path in [self.folder / f"ckpt-{step}.json", *self._files(step)]:
            path.unlink(missing_ok=True)


def _signed(content: dict[str, Any]) -> dict[str, Any]:
    """The same with a checksum of itself."""
    text = json.dumps(content, sort_keys=True)
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _fingerprint(path: pathlib.Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
