"""Shows what a model will see: python -m pipelines.preview --dataset=fashion_mnist

Takes the data and pipeline flags of training. Prints the spec, the splits, the reader and its
memory, how often each class occurs; and draws a sheet of one batch exactly as the model receives
it: augmented, scaled to float32, mixed if --augment says so, labels under the pictures. Of data
that are no images it prints some rows.
"""

from collections.abc import Sequence

from absl import flags

import pipelines
from pipelines import UserError, cli, plots

SHOWN = ("train", "eval")


def define_flags(values: flags.FlagValues) -> None:
    """Defines what to show and where to draw it on `values`."""
    flags.DEFINE_string(
        "output", "preview.png", "PNG file to draw the sheet to; empty: none.", flag_values=values
    )
    flags.DEFINE_enum(
        "show", "train", SHOWN, "Draw a batch of training or of evaluation.", flag_values=values
    )
    flags.DEFINE_integer(
        "step", 0, "Number of the batch, counted over epochs.", lower_bound=0, flag_values=values
    )
    flags.DEFINE_integer(
        "num_examples", 32, "Most examples to show of it.", lower_bound=1, flag_values=values
    )


def main(argv: Sequence[str]) -> int:
    """Parses flags, prints what there is to know, draws the sheet; returns the exit code."""
    values = cli.parse_flags(argv, __doc__, pipelines.define_flags, define_flags)
    config = pipelines.config_from_flags(values)
    if values.output:
        plots.check_target("output", values.output)
    cli.check_environment()
    cli.set_up_logging(values.verbosity)
    cli.import_tensorflow(values.verbosity)
    from pipelines import inspection

    data = pipelines.load_data(config, mixing=True)
    for line in inspection.description(data):
        print(line)
    pipeline = data.train if values.show == "train" else data.evaluation
    mix_fn = data.mix_fn if values.show == "train" else None
    shown = inspection.model_view(pipeline, values.step, values.num_examples, mix_fn)
    if not data.spec.is_image:
        print("\n".join(inspection.table(data.spec, shown)))
    elif values.output:
        if not plots.available():
            raise UserError(f"--output={values.output}: {plots.MISSING}; or --output= for none")
        title = f"{pipeline.name}, step {values.step}"
        if values.show == "train" and config.augment:
            title += f", --augment={','.join(map(pipelines.symbol_name, config.augment))}"
        inspection.draw_sheet(data.spec, shown, title, values.output)
        print(f"sheet of {len(shown.inputs)} of {pipeline.batch_size} examples: {values.output}")
    return 0


if __name__ == "__main__":
    cli.run(main)
