"""One picture of one or several runs: `python -m minirl.extras.plot RUN [RUN ...]`.

RUN is a run's folder, or its name in ./runs or $MINIRL_RUNS. Drawn from metrics.jsonl: reward and held-out score,
entropy, KL divergence, lengths, the gap between sampling and training, and where the time went. Needs matplotlib:
pip install -e '.[plot]'.
"""

import math
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
    "reward/mean policy/entropy policy/kl_ref_k3 policy/kl_old_k3 len/mean policy/logp_gap_max"
).split()
SMOOTHED_STEPS = 10  # of the running mean that is drawn over the single steps
Lines = list[dict[str, Any]]  # of metrics.jsonl: the numbers of each step
Runs = list[tuple[str, Lines]]  # each with its name


def read_run(name: str) -> tuple[str, Lines]:
    """A run's name and the numbers of its steps. Raises InputError if it has no steps."""
    folder = find_run(name, "metrics.jsonl")
    lines = read_json_lines(folder / "metrics.jsonl")
    refuse(not lines, f"{folder}/metrics.jsonl has no steps yet")
    return folder.resolve().name, lines


def series(lines: Lines, metric: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, where it is there and finite."""
    measured = [line for line in lines if line.get(metric) is not None]
    return [line["step"] for line in measured], [line[metric] for line in measured]


def running_mean(values: list[float]) -> list[float]:
    """Each value's mean with up to `SMOOTHED_STEPS` - 1 values before it."""
    return [fmean(values[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(values) + 1)]


def draw_lines(axes: Any, runs: Runs, metric: str) -> None:
    """Draw a metric of all runs that have it; on the reward, also each evaluation (at step 0 that before training)."""
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


def draw_time(axes: Any, lines: Lines) -> None:
    """The seconds of a run's steps by cause, one upon the other."""
    from matplotlib import colormaps

    found = {name.removeprefix("time/") for line in lines for name in line if name.startswith("time/")}
    causes = sorted(found - {"step"})
    stack = [running_mean([line.get(f"time/{cause}") or 0.0 for line in lines]) for cause in causes]
    if stack:
        colors = colormaps["tab20"](range(len(causes)))
        axes.stackplot([line["step"] for line in lines], stack, labels=causes, colors=colors, linewidth=0)
        axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # room for the legend
        axes.legend(ncols=4, fontsize=7, frameon=False, loc="upper left", columnspacing=1.0)


def draw(runs: Runs) -> Any:
    """The picture, a figure of matplotlib."""
    from matplotlib.figure import Figure

    metrics = [metric for metric in METRICS if any(series(lines, metric)[0] for _, lines in runs)]
    num_rows = math.ceil((len(metrics) + len(runs)) / 3)
    figure = Figure(figsize=(13, 3.5 * num_rows), layout="constrained")

    def next_axes(title: str, size: int) -> Any:
        axes = figure.add_subplot(num_rows, 3, len(figure.axes) + 1, xlabel="step")
        axes.grid(alpha=0.25)
        axes.set_title(title, loc="left", fontsize=size)
        return axes

    for metric in metrics:
        draw_lines(next_axes(metric, 11), runs, metric)
    for name, lines in runs:
        draw_time(next_axes(f"seconds of a step\n{name}", 9), lines)
    return figure


def main(runs: Positional[tuple[str, ...]], output: Path = Path("runs.png")) -> None:
    """Draw runs into one picture. Without runs, or for one without steps, it raises InputError.

    Args:
        runs: folders of runs, or their names in ./runs or $MINIRL_RUNS
        output: the picture
    """
    refuse(not runs, "name one run or more to draw")
    named = [read_run(run) for run in runs]
    draw(named).savefig(output, dpi=80)
    print0(f"drew {', '.join(name for name, _ in named)} into {output}")


if __name__ == "__main__":
    launch.run(lambda: tyro.cli(main, prog="python -m minirl.extras.plot"))
