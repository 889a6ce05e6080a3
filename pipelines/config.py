"""The data and pipeline flags, and the frozen dataclass they become."""

import dataclasses

from absl import flags

from pipelines.definer import FlagDefiner, settle_types
from pipelines.errors import UserError

READERS = ("auto", "memory", "indexed", "stream")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which data, and how it becomes batches. Field meanings: the help of the flag of that name."""

    dataset: str = "mnist_5k"
    data_dir: str | None = None
    download: bool = True
    train_split: str = "train"
    eval_split: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    num_classes: int | None = None
    batch_size: int = 128
    eval_batch_size: int | None = None
    shuffle: bool = True
    drop_remainder: bool = True
    augment: tuple[str, ...] = ()
    image_size: int | None = None
    reader: str = "auto"
    shuffle_window: int | None = None
    num_parallel_calls: int | None = None
    prefetch_batches: int | None = None
    on_bad_record: str = "fail"
    use_synthetic_data: bool = False
    seed: int = 0

    def __post_init__(self):
        settle_types(self)
        if self.data_dir == "":
            raise UserError("--data_dir= is empty: name a folder or leave the flag out")


def define_flags(values: flags.FlagValues) -> None:
    """Defines the data and pipeline flags on `values`."""
    definer = FlagDefiner(values, DataConfig())
    _define_data(definer)
    _define_pipeline(definer)
    flags.DEFINE_string(
        "data_service", None, "Address of a tf.data service dispatcher.", flag_values=values
    )


def _define_data(f: FlagDefiner) -> None:
    f.string(
        "dataset",
        "TFDS name[/config][:version], package.module:BuilderClass[/config][:version], or the "
        "folder of a prepared dataset (the one of its version).",
    )
    f.string(
        "data_dir",
        "Folder of prepared TFDS datasets (default: TFDS_DATA_DIR, else ~/tensorflow_datasets).",
    )
    f.boolean("download", "Download and prepare the dataset if --data_dir lacks it.")
    f.string("train_split", "TFDS split to train on, slices allowed.")
    f.string(
        "eval_split",
        "TFDS split to evaluate on, slices allowed such as train[90%:]. Empty: validation, else "
        "test, else the last 10% of --train_split, which is then taken out of training.",
    )
    f.string("input_key", "Feature fed to the model (default: supervised keys, else inferred).")
    f.string("label_key", "Feature to predict (default: supervised keys, else inferred).")
    f.integer(
        "num_classes",
        "Classes of a label that is a plain integer (default: counted in the training split).",
    )
    f.boolean(
        "use_synthetic_data",
        "Feed random examples of the dataset's shapes without reading: the pipeline's ceiling.",
    )
    f.integer("seed", "Seed of weights, data order and augmentation.", lower=0)


def _define_pipeline(f: FlagDefiner) -> None:
    f.integer(
        "batch_size",
        "Examples of one optimizer update over all replicas; must divide by replicas x "
        "--grad_accum_steps.",
    )
    f.integer(
        "eval_batch_size",
        "Examples of one evaluation step over all replicas; any number, batches are padded and "
        "masked (default: --batch_size).",
    )
    f.boolean("shuffle", "Visit the training split in a new order each epoch.")
    f.integer(
        "shuffle_window",
        "Examples the stream reader shuffles together (default: what fits in 128 MB, at least 8 "
        "batches); its memory is a few times that.",
    )
    f.choice(
        "reader",
        READERS,
        "memory holds the split in RAM; indexed reads single records from disk, in any order; "
        "stream reads runs of neighbours and shuffles within a window; auto chooses and logs why.",
    )
    f.boolean(
        "drop_remainder",
        "Leave out the examples of an epoch that do not fill a batch; false: train on a short "
        "last batch, weighted by its true size.",
    )
    f.items(
        "augment",
        "Augmentations of training examples, in order: flip, crop, color, cutout, randaug, rrc "
        "(random-resized crop; the default for images that vary in size, unless center is given), "
        "mixup, cutmix, or module:function called with (example, seed).",
    )
    f.integer(
        "image_size",
        "Side in pixels of the square images a model sees (default: as stored; 224 for images that "
        "vary in size).",
    )
    f.integer(
        "num_parallel_calls",
        "Parallel calls of the pipeline's map stages (default, and 0: one per core, two per core "
        "where images are decoded).",
        lower=0,
    )
    f.integer(
        "prefetch_batches",
        "Batches prepared ahead (default, and 0: two chunks of batches).",
        lower=0,
    )
    f.choice(
        "on_bad_record",
        ("fail", "skip"),
        "What to do with a record that cannot be read or decoded: stop, naming it, or give it "
        "weight 0, log and count it.",
    )


def config_from_flags(values: flags.FlagValues) -> DataConfig:
    """Reads the flags that `define_flags` defined.

    Raises:
      UserError: for values that cannot be honoured.
    """
    if values.data_service:
        raise UserError("--data_service: reading through a tf.data service is not supported yet")
    fields = {f.name: getattr(values, f.name) for f in dataclasses.fields(DataConfig)}
    fields["augment"] = tuple(values.augment)
    for name in ("num_parallel_calls", "prefetch_batches", "eval_split", "input_key", "label_key"):
        fields[name] = fields[name] or None
    return DataConfig(**fields)
