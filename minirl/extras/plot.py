"""Plot one or more runs: `python -m minirl.extras.plot RUN [RUN ...]`.

RUN is a run's folder, or its name in ./runs or $MINIRL_RUNS. The values come from metrics.jsonl: training and held-out
reward, entropy, KL, completion length, the gap between sampling and training logprobs, and the time breakdown of a
step. Requires matplotlib: pip install -e '.[plot]'.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro
from tyro.conf import Positional

from minirl.errors import refuse
from minirl.files.json_files import read_json_lines
from minirl.ranks import launch
from minirl.ranks.process_group import print0
from minirl.run.run_folder import find_run

METRICS = (
    "reward/mean",
    "policy/entropy",
    "policy/kl_ref_k3",
    "policy/kl_old_k3",
    "len/mean",
    "policy/logp_gap_max",
)
SMOOTHED_STEPS = 10  # window of the running mean
Lines = list[dict[str, Any]]  # one metrics.jsonl line per step
Runs = list[tuple[str, Lines]]  # name and lines of each run


def read_run(name: str) -> tuple[str, Lines]:
    """Return a run's name and metrics. Raises InputError for a run without steps."""
    folder = find_run(name, "metrics.jsonl")
    lines = read_json_lines(folder / "metrics.jsonl")
    refuse(not lines, f"{folder}/metrics.jsonl has no steps yet")
    return folder.resolve().name, lines


def series(lines: Lines, metric: str) -> tuple[list[int], list[float]]:
    """Return a metric's steps and values, omitting steps where the value is missing or non-finite."""
    measured = [line for line in lines if line.get(metric) is not None]
    return [line["step"] for line in measured], [line[metric] for line in measured]


def running_mean(values: list[float]) -> list[float]:
    """Return the mean of each value and up to `SMOOTHED_STEPS` - 1 preceding values."""
    return [fmean(values[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(values) + 1)]


def draw_lines(axes: Any, runs: Runs, metric: str) -> None:
    """Plot a metric for all runs. On the reward panel, also plot the held-out rewards; step 0 is before training."""
    for i, (name, lines) in enumerate(runs):
        steps, values = series(lines, metric)
        axes.plot(steps, values, color=f"C{i}", alpha=0.25, linewidth=0.8)
        axes.plot(steps, running_mean(values), color=f"C{i}", linewidth=1.8, label=name)
        if metric == "reward/mean":
            evaluated, scores = series(lines, "eval/reward")
            _, before = series(lines, "eval/before")
            steps = [0] * len(before) + evaluated
            axes.plot(steps, before + scores, "o", color=f"C{i}", label=f"{name}, held out")
            axes.legend(fontsize=8, frameon=False)


def draw_time(axes: Any, runs: Runs) -> None:
    """Draw each run's mean step time as a bar, stacked by cause."""
    from matplotlib import colormaps

    time_metrics = {name for _, lines in runs for line in lines for name in line if name.startswith("time/")}
    causes = sorted(time_metrics - {"time/step"})
    ends = [0.0] * len(runs)
    for cause, color in zip(causes, colormaps["tab20"](range(len(causes))), strict=True):
        seconds = [fmean([line.get(cause) or 0.0 for line in lines]) for _, lines in runs]
        label = cause.removeprefix("time/")
        axes.barh([name for name, _ in runs], seconds, 0.5, left=ends, color=color, label=label)
        ends = [end + width for end, width in zip(ends, seconds, strict=True)]
    axes.set_ylim(len(runs) + 0.2, -0.5)  # first run on top, with room for the legend below
    axes.set_xlabel("seconds")
    axes.legend(ncols=3, fontsize=8, frameon=False, loc="lower left")


def draw(runs: Runs, metrics: Iterable[str] = METRICS) -> Any:
    """Return a matplotlib figure with one panel per metric that any run has, and a panel for the step time."""
    from matplotlib.figure import Figure

    shown = [metric for metric in metrics if any(series(lines, metric)[0] for _, lines in runs)]
    num_panels = len(shown) + 1
    num_columns = min(3, num_panels)
    num_rows = math.ceil(num_panels / num_columns)
    figure = Figure(figsize=(4.5 * num_columns, 3.5 * num_rows), layout="constrained")
    *panels, time_panel = [
        figure.add_subplot(num_rows, num_columns, index) for index in range(1, num_panels + 1)
    ]
    for axes, metric in zip(panels, shown, strict=True):
        axes.set_title(metric, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        draw_lines(axes, runs, metric)
    time_panel.set_title("mean time of a step", loc="left", fontsize=11)
    draw_time(time_panel, runs)
    return figure


def main(
    runs: Positional[tuple[str, ...]], output: Path = Path("runs.png"), metrics: tuple[str, ...] = METRICS
) -> None:
    """Plot several runs in one figure. Raises InputError if no runs are given or a run has no steps.

    Args:
        runs: run folders, or run names in ./runs or $MINIRL_RUNS
        output: file where the figure is saved
        metrics: names of the metrics to plot, one panel each
    """
    refuse(not runs, "no runs given; name at least one run to plot")
    named = [read_run(run) for run in runs]
    draw(named, metrics).savefig(output, dpi=80)
    print0(f"drew {', '.join(name for name, _ in named)} into {output}")


if __name__ == "__main__":
    launch.run(lambda: tyro.cli(main, prog="python -m minirl.extras.plot"))
