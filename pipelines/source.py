"""TFDS datasets: finding, preparing, and cutting them into splits."""

import contextlib
import dataclasses
import io
import logging
import os
import pathlib
import re
import socket
import sys
import urllib.parse
from collections.abc import Callable
from typing import Any

import tensorflow_datasets as tfds

from pipelines.config import DataConfig
from pipelines.errors import UserError
from pipelines.symbols import is_symbol, load_symbol

_log = logging.getLogger(__name__)

_NETWORK_TIMEOUT_SECS = 5.0
_HOLD_OUT_PERCENT = 10
_BUILDER_CLASS = re.compile(r"([A-Za-z_][\w.]*:[A-Za-z_]\w*)(?:/([^/:]+))?(?::([^/:]+))?")


@dataclasses.dataclass(frozen=True)
class Split:
    """A run of examples of a TFDS split, numbered from 0 in file order.

    Attributes:
      name: the split as TFDS spells it, slices and sums included.
      skip: examples of it left out at the front.
      num_examples: examples in the run.
    """

    name: str
    skip: int
    num_examples: int

    def __str__(self) -> str:
        if self.skip == 0:
            return self.name
        return f"{self.name} from example {self.skip}"


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Neighbouring records of one file that belong to a split.

    Attributes:
      path: the file.
      first: number of the first record, from 0.
      count: records.
      num_in_shard: records in the file, as the dataset's metadata promises.
    """

    path: str
    first: int
    count: int
    num_in_shard: int


def stretches(builder: tfds.core.DatasetBuilder, split: Split) -> list[Stretch]:
    """Where a split's examples lie, in the order of their positions."""
    found, skip, left = [], split.skip, split.num_examples
    for f in builder.info.splits[split.name].file_instructions:
        count = min(left, max(0, f.take - skip))
        if count:
            found.append(Stretch(f.filename, f.skip + skip, count, f.examples_in_shard))
        skip, left = max(0, skip - f.take), left - count
    return found


def open_builder(config: DataConfig) -> tfds.core.DatasetBuilder:
    """Finds the dataset and prepares it if needed.

    Raises:
      UserError: if it does not exist, or is not prepared and cannot be.
    """
    builder = _find_builder(config)
    if not builder.is_prepared():
        _prepare(builder, config)
        builder = _find_builder(config)  # another process may have prepared it meanwhile
    if not builder.info.splits:
        raise UserError(f"{builder.data_dir}: the prepared dataset lists no splits")
    return builder


def _find_builder(config: DataConfig) -> tfds.core.DatasetBuilder:
    name, data_dir = config.dataset, config.data_dir
    if is_symbol(name) or _BUILDER_CLASS.fullmatch(name):
        cls, options = _builder_class(name)
        return _make(config, lambda: cls(data_dir=data_dir, **options))
    if os.sep in name and os.path.isdir(name):
        if not os.path.exists(os.path.join(name, "dataset_info.json")):
            raise UserError(
                f"--dataset={name}: no prepared dataset in this folder (no dataset_info.json)"
                + _prepared_below(name)
            )
        return _make(config, lambda: tfds.builder_from_directory(name))
    if name.partition(":")[0] == "mnist_5k":
        from pipelines.datasets.mnist_5k import Mnist5k

        version = name.partition(":")[2] or None
        options = {"version": version} if version else {}
        return _make(config, lambda: Mnist5k(data_dir=data_dir, **options))
    try:
        return _make(config, lambda: tfds.builder(name, data_dir=data_dir))
    except tfds.core.DatasetNotFoundError as error:
        raise UserError(
            f"--dataset={name}: no such dataset; give a TFDS name{_similar_names(name)}, mnist_5k, "
            "package.module:BuilderClass[/config][:version], or the folder of a prepared dataset"
        ) from error


def _builder_class(name: Any) -> tuple[type, dict[str, str]]:
    """The class that `module:BuilderClass[/config][:version]` names, and its arguments.

    Raises:
      UserError: if it does not exist or is no builder.
    """
    symbol, options = name, {}
    if not is_symbol(name):
        symbol, *named = _BUILDER_CLASS.fullmatch(name).groups()
        options = {k: v for k, v in zip(("config", "version"), named, strict=True) if v}
    cls = load_symbol("dataset", symbol)
    if not (isinstance(cls, type) and issubclass(cls, tfds.core.DatasetBuilder)):
        raise UserError(f"--dataset={name}: not a TFDS builder class")
    return cls, options


def _prepared_below(folder: str) -> str:
    """Where in a folder of versions, or of configs with versions, the prepared datasets are."""
    root = pathlib.Path(folder)
    found = [p.parent for way in ("*", "*/*") for p in root.glob(f"{way}/dataset_info.json")]
    return f"; there is one in {', '.join(map(str, sorted(found)[:5]))}" if found else ""


def _make(config: DataConfig, make_fn: Callable[[], tfds.core.DatasetBuilder]):
    """Makes a builder, which reads what is prepared."""
    try:
        return make_fn()
    except tfds.core.DatasetNotFoundError:
        raise
    except Exception as error:  # a builder's code, or damaged metadata: whatever it raises
        folder = config.data_dir or "the default --data_dir"
        raise UserError(
            f"--dataset={config.dataset}: opening it failed, with what is prepared in {folder}: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from error


def _similar_names(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, [*tfds.list_builders(with_community_datasets=False)])
    return f" (such as {', '.join(close)})" if close else ""


def _prepare(builder: tfds.core.DatasetBuilder, config: DataConfig) -> None:
    where = f"{builder.info.full_name} is not prepared in {builder.data_dir_root}"
    if not config.download:
        raise UserError(f"{where} and --download=false")
    unreachable = _unreachable_host(builder)
    if unreachable:
        raise UserError(f"{where}, and its source {unreachable} cannot be reached from here")
    _log.info("%s: preparing it now", where)
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    try:
        os.makedirs(builder.data_dir_root, exist_ok=True)
        lock = os.path.join(builder.data_dir_root, f".{builder.name}.lock")
        # TFDS prints what is logged here already, and stdout is for a command's results.
        with _exclusive(lock), contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare(
                download_config=tfds.download.DownloadConfig(try_download_gcs=False)
            )
    except Exception as error:  # a builder's code: whatever it raises
        raise UserError(f"{where} and cannot be: {type(error).__name__}: {error}") from error


def _unreachable_host(builder: tfds.core.DatasetBuilder) -> str | None:
    """The host a download needs, if no connection to it opens; TFDS itself retries for minutes."""
    urls = list(getattr(builder, "url_infos", None) or ())
    if not urls or any(os.environ.get(v) for v in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY")):
        return None
    parts = urllib.parse.urlsplit(urls[0])
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), _NETWORK_TIMEOUT_SECS).close()
    except OSError:
        return parts.hostname
    return None


@contextlib.contextmanager
def _exclusive(path: str):
    """Lets one process at a time prepare a dataset; the others find it prepared."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: TFDS's own atomic rename must do
        yield
        return
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            _log.warning("%s: no locks here: let one process prepare it at a time", path)
        yield


def choose_splits(
    builder: tfds.core.DatasetBuilder, config: DataConfig, evaluating: bool
) -> tuple[Split, Split | None]:
    """Cuts the training and the evaluation split.

    Args:
      builder: a prepared dataset.
      config: names the splits.
      evaluating: whether an evaluation split is wanted.

    Returns:
      (training split, evaluation split or None).

    Raises:
      UserError: for unknown or empty splits.
    """
    train = _split(builder, "train_split", config.train_split)
    if not evaluating:
        return train, None
    if config.eval_split:
        evaluation = _split(builder, "eval_split", config.eval_split)
    else:
        name = next((n for n in ("validation", "test") if n in builder.info.splits), None)
        if name is None or builder.info.splits[name].num_examples == 0:
            return _hold_out(train)
        evaluation = _split(builder, "eval_split", name)
    shared = _num_shared(builder, train, evaluation)
    if shared:
        _log.warning(
            "%d examples are in both --train_split=%s and the evaluation split %s",
            shared,
            train.name,
            evaluation.name,
        )
    return train, evaluation


def _split(builder: tfds.core.DatasetBuilder, flag: str, name: str) -> Split:
    splits = builder.info.splits
    offers = ", ".join(f"{n} ({s.num_examples} examples)" for n, s in splits.items())
    try:
        num_examples = splits[name].num_examples
        if any(f.take < 0 for f in splits[name].file_instructions):
            num_examples = 0
    except (KeyError, ValueError, AssertionError) as error:
        reason = str(error).strip("'\"").splitlines()[0]
        raise UserError(f"--{flag}={name}: {reason} {builder.name} has {offers}") from error
    if num_examples < 1:
        raise UserError(f"--{flag}={name}: no examples in it; {builder.name} has {offers}")
    split = Split(name, 0, num_examples)
    repeated = (_num_shared(builder, split, split) - num_examples) // 2 if "+" in name else 0
    if repeated:
        _log.warning("--%s=%s: %d of its examples come twice or more", flag, name, repeated)
    return split


def _hold_out(train: Split) -> tuple[Split, Split]:
    held = max(1, train.num_examples * _HOLD_OUT_PERCENT // 100)
    kept = train.num_examples - held
    if kept < 1:
        raise UserError(
            f"--train_split={train.name} has {train.num_examples} example and no other split to "
            "evaluate on: give --eval_split or --mode=train"
        )
    _log.info(
        "no validation or test split: evaluating on the last %d examples of %s, training on the "
        "other %d",
        held,
        train.name,
        kept,
    )
    return Split(train.name, 0, kept), Split(train.name, kept, held)


def _num_shared(builder: tfds.core.DatasetBuilder, a: Split, b: Split) -> int:
    """Examples that both splits hold, counted from the stretches of the files they cover."""
    return sum(
        max(0, min(x.first + x.count, y.first + y.count) - max(x.first, y.first))
        for x in stretches(builder, a)
        for y in stretches(builder, b)
        if x.path == y.path
    )
