"""Trains, evaluates or exports a model: python -m trainer.main --strategy=mirrored"""

import os
from collections.abc import Sequence

import pipelines
from pipelines import cli
from trainer import config as config_lib
from trainer.signals import Stopped, StopRequest


def main(argv: Sequence[str]) -> int:
    """Parses flags, runs the job, prints its result in one line; returns the exit code."""
    with StopRequest().listening() as stop:
        values = cli.parse_flags(argv, __doc__, config_lib.define_flags, pipelines.define_flags)
        config = config_lib.config_from_flags(values)
        data_config = pipelines.config_from_flags(values)
        cli.check_environment()
        cli.set_up_logging(values.verbosity)
        cli.import_tensorflow(values.verbosity)
        from trainer import job

        try:
            result = job.run(config, data_config, cli.flags_text(values), stop)
        except Stopped as stopped:
            return stopped.exit_code
    print(summary_line(config, result))
    return 0


def summary_line(config: config_lib.TrainConfig, result: dict) -> str:
    """What came out, for a person."""
    if config.mode == "export":
        return f"exported to {os.path.join(result['model_dir'], 'export')}"
    parts = []
    evaluation = result["eval"]
    if evaluation:
        skipped = ("step", "examples", "seconds", "weights", "data", "skipped_records")
        metrics = [f"{k} {v:.4f}" for k, v in evaluation.items() if k not in skipped]
        parts.append(f"{', '.join(metrics)} on {evaluation['examples']} examples")
    if config.training:
        parts.append(f"{result['steps']} steps ({result['epochs']:.4g} epochs)")
        parts.append(f"{result['examples_per_sec']:,.0f} examples/s")
    return " | ".join([*parts, f"results in {result['model_dir']}"])


if __name__ == "__main__":
    cli.run(main)
