"""Pictures of figures and of batches, with matplotlib, which is an optional extra."""

import importlib.util
from collections.abc import Sequence
from typing import Any

from pipelines.errors import UserError
from pipelines.tables import Row, check_writable

MISSING = "pictures need matplotlib: pip install 'pipeline-trainer[plots]'"

_COST_COLOUR, _INK = "#c2703d", "#333333"
_LOG_RANGE = 30  # figures that lie further apart are drawn on a logarithmic scale


def check(flag: str, path: str) -> None:
    """Refuses a picture that could not be made.

    Args:
      flag: the flag that asks for it.
      path: where it is to be written, as PNG.

    Raises:
      UserError: if matplotlib is missing, the name does not end in .png or cannot be written.
    """
    if not available():
        raise UserError(f"--{flag}={path}: {MISSING}")
    check_target(flag, path)


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_target(flag: str, path: str) -> None:
    """Refuses a file that is no PNG or cannot be written.

    Raises:
      UserError: naming the flag.
    """
    if not path.lower().endswith(".png"):
        raise UserError(f"--{flag}={path}: the name of a picture must end in .png")
    check_writable(flag, path)


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure of a size in inches, apart from any global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def benchmark_chart(rows: Sequence[Row], path: str) -> None:
    """Draws speed and cost of all rows of `pipelines.benchmark` as bars.

    Args:
      rows: as measured, the summary last.
      path: PNG file to write.
    """
    *rows, summary = rows
    names = [bar_name(row) for row in rows]
    figure = new_figure(11, 1.6 + 0.34 * len(rows))
    speed, cost = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    rates = [row["examples_per_sec"] for row in rows]
    errors = [
        [row["examples_per_sec"] - row["examples_per_sec_min"] for row in rows],
        [row["examples_per_sec_max"] - row["examples_per_sec"] for row in rows],
    ]
    colours = [_colour(row, summary) for row in rows]
    speed.barh(names, rates, xerr=errors, color=colours, ecolor=_INK, capsize=2)
    speed.invert_yaxis()
    speed.set_xlabel("examples/s: median, least, greatest")
    costs = [row["cpu_us_per_example"] for row in rows]
    cost.barh(names, costs, color=_COST_COLOUR)
    cost.set_xlabel("core-microseconds per example")
    for axes, values, padding in ((speed, rates, 14), (cost, costs, 3)):
        if max(values) > _LOG_RANGE * min(values):
            axes.set_xscale("log")
        labels = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        bars = axes.containers[-1]
        axes.bar_label(bars, labels, fontsize=8, color=_INK, padding=padding)
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(summary), fontsize=10)
    figure.savefig(path, dpi=130)


def bar_name(row: Row) -> str:
    """The stage, and the sweep's flags."""
    return " ".join([row["stage"], *(f"{name}={value}" for name, value in row["variant"].items())])


def _colour(row: Row, summary: Row) -> str:
    if row["stage"] == "pipeline":
        return "#1f5f99"
    if row["stage"].startswith("baseline:"):
        return "#a8a8a8"
    return "#c23d3d" if row["stage"] == summary["limiting_stage"] else "#8fb8de"


def _title(summary: Row) -> str:
    flags, machine = summary["flags"], summary["machine"]
    parts = [
        f"{flags['dataset']}, batch {flags['batch_size']}, {summary['reader']} reader",
        f"{machine['cores']} cores of {machine['cpu']}",
    ]
    if summary["limiting_stage"]:
        parts.append(f"limited by {summary['limiting_stage']} (red)")
    return "   |   ".join(parts)
