"""From flags to pipelines: opens a dataset, checks what is asked of it, and assembles."""

import dataclasses
import logging

import tensorflow as tf
import tensorflow_datasets as tfds

from pipelines import augment as augment_lib
from pipelines import features as features_lib
from pipelines import images, mix, readers, source
from pipelines.assembly import INDEX, WEIGHT, Pipeline
from pipelines.config import DataConfig, define_flags
from pipelines.decode import Decoder
from pipelines.definer import check_values
from pipelines.errors import UserError
from pipelines.order import Order
from pipelines.records import Records
from pipelines.resources import num_cores
from pipelines.synthetic import SyntheticReader

__all__ = ["INDEX", "WEIGHT", "Data", "Pipeline", "load_data", "num_cores"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Data:
    """A dataset ready to train on and to evaluate.

    Attributes:
      name: full TFDS name, with configuration and without version.
      version: the dataset's version.
      train: the training pipeline, None if only evaluation was asked for.
      evaluation: the evaluation pipeline, None if only training was asked for.
      spec: what a model must accept and return.
      mix_fn: what --augment mixes in the training step: like `mix.mixup`, or None.
    """

    name: str
    version: str
    train: Pipeline | None
    evaluation: Pipeline | None
    spec: features_lib.Spec
    mix_fn: mix.MixFn | None = None


def load_data(
    config: DataConfig,
    training: bool = True,
    evaluating: bool = True,
    numeric_labels: bool = False,
    mixing: bool = False,
) -> Data:
    """Opens the dataset and builds the pipelines asked for.

    Args:
      config: which data, and how it becomes batches.
      training: whether `Data.train` is wanted.
      evaluating: whether `Data.evaluation` is wanted.
      numeric_labels: take integer labels as numbers to predict, not as classes.
      mixing: whether the caller applies `Data.mix_fn`; otherwise mixup and cutmix are refused.

    Raises:
      UserError: for whatever in `config` the dataset cannot honour; told before data is read where
        it can be known.
    """
    check_values(config, define_flags)
    _check_flags(config)
    builder = source.open_builder(config)
    loader = _Loader(config, builder, numeric_labels)
    if loader.mixes and not mixing:
        raise UserError(f"--augment={loader.mixes[0]}: mixes examples in training; not done here")
    train_split, eval_split = source.choose_splits(builder, config, evaluating)
    if training:
        _check_batch(loader.train_order(train_split), train_split)
    train_records = loader.records(train_split) if training else None
    loader.settle_classes(train_records)
    return Data(
        name=builder.info.full_name.rpartition("/")[0],
        version=str(builder.info.version),
        train=loader.train(train_split, train_records) if training else None,
        evaluation=loader.evaluation(eval_split) if evaluating else None,
        spec=loader.spec,
        mix_fn=mix.make_mix_fn(config.augment),
    )


def _check_flags(config: DataConfig) -> None:
    if config.shuffle_window and (config.reader != "stream" or not config.shuffle):
        raise UserError("--shuffle_window: only --reader=stream with --shuffle has a window")
    if config.use_synthetic_data and config.reader != "auto":
        raise UserError(f"--reader={config.reader}: --use_synthetic_data reads nothing")


def _check_batch(order: Order, split: source.Split) -> None:
    if order.steps_per_epoch == 0:
        raise UserError(
            f"--batch_size={order.batch_size} is larger than the {order.num_examples} examples of "
            f"{split}: choose a smaller one, or --drop_remainder=false"
        )


class _Loader:
    """What the splits of a dataset share on their way to pipelines.

    Attributes:
      spec: the data's spec, complete after `settle_classes`.
      mixes: entries of --augment that mix examples.
    """

    def __init__(self, config: DataConfig, builder: tfds.core.DatasetBuilder, numeric: bool):
        self._config, self._builder, self._numeric = config, builder, numeric
        info = builder.info
        keys = features_lib.choose_keys(info, config.input_key, config.label_key)
        self._features = features_lib.usable_features(info, *keys)
        self.spec = features_lib.make_spec(info, *keys, self._features, config.image_size)
        self._varying = self.spec.varies_in_size
        augment_lib.check_names(config.augment, self.spec, self._varying)
        self.mixes = [name for name in config.augment if name in mix.MIXES]
        self._crops = augment_lib.RANDOM_CROP in config.augment
        if self._varying and not self._crops:
            self._crops = augment_lib.CENTER not in config.augment

    def records(self, split: source.Split) -> Records | None:
        """The split's records, None if nothing is to be read."""
        if self._config.use_synthetic_data:
            return None
        return Records(self._builder, split, self._config.on_bad_record == "skip")

    def settle_classes(self, records: Records | None) -> None:
        """Decides what the label's numbers mean, reading the training labels where it must."""
        label_key = self.spec.label_key
        if self._numeric:
            self.spec = self.spec.for_regression()
        elif features_lib.is_integer_label(self._features[label_key]):
            num_classes = self.spec.num_classes or self._config.num_classes
            if num_classes is None and records is not None:
                num_classes = _count_classes(records, label_key)
            self.spec = self.spec.with_classes(num_classes)

    def train_order(self, split: source.Split) -> Order:
        config = self._config
        return Order(
            split.num_examples,
            config.batch_size,
            config.seed,
            config.shuffle,
            config.drop_remainder,
        )

    def train(self, split: source.Split, records: Records | None) -> Pipeline:
        config, order = self._config, self.train_order(split)
        reader = self._reader(split, records, training=True)
        if reader.name == "stream":
            order = readers.windowed(order, records, config.shuffle_window)
        shown = tf.TensorSpec(self.spec.input_shape, self.spec.input_dtype)
        augment_lib.check_calls(config.augment, {**reader.types, self.spec.input_key: shown})
        augment = augment_lib.make_augment_fn(
            config.augment,
            self.spec,
            crops=self._crops and not self._varying,
            flips=not self._varying,
        )
        return self._pipeline(split, reader, order, augment)

    def evaluation(self, split: source.Split) -> Pipeline:
        size = self._config.eval_batch_size or self._config.batch_size
        order = Order(split.num_examples, size, shuffle=False, drop_remainder=False)
        reader = self._reader(split, self.records(split), training=False)
        return self._pipeline(split, reader, order, None)

    def _reader(self, split: source.Split, records: Records | None, training: bool):
        """Opens a reader of images as the model sees them, or as what augmentation starts from."""
        spec, view = self.spec, None
        if self._varying:
            flip_salt = augment_lib.flip_salt(self._config.augment) if training else None
            view = images.View(spec.input_shape[:2], training and self._crops, flip_salt)
        elif training and self._crops:
            spec = dataclasses.replace(spec, input_shape=spec.stored_shape)
        decoder = Decoder(self._features, self._builder.info, spec, view, records and records.bad)
        if records is None:
            return SyntheticReader(decoder.types, spec, split.num_examples)
        return readers.open_reader(self._config.reader, records, decoder, split)

    def _pipeline(self, split, reader, order: Order, augment) -> Pipeline:
        return Pipeline(
            reader,
            order,
            self.spec,
            augment,
            self._config.num_parallel_calls,
            self._config.prefetch_batches,
            name=f"{self._builder.info.full_name}, split {split}",
        )


def _count_classes(records: Records, label_key: str) -> int | None:
    """Classes of a label that is a plain integer; None if it does not number classes."""
    num_classes = readers.count_classes(records, label_key)
    if not num_classes:
        _log.info("label %r is an integer with negative values: taken as a number", label_key)
        return None
    _log.info(
        "label %r is a plain integer: taken as one of %d classes, counted in the training split",
        label_key,
        num_classes,
    )
    return num_classes
