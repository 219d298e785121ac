"""One picture of one or several runs: `python -m minirl.plot RUN [RUN ...]`.

RUN is a run's folder, or its name in ./runs or $MINIRL_RUNS. Drawn from metrics.jsonl: reward and held-out score,
entropy, KL divergence, lengths, the gap between sampling and training, and where the time went. Needs matplotlib:
pip install -e '.[plot]'.
"""

import argparse
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from minirl.errors import InputError
from minirl.report.logger import read_metrics
from minirl.run.run_folder import find_run

# The account of time, from the ground up.
CAUSES = (
    *("prefill", "decode", "decode_comm", "score", "update", "update_comm", "refresh"),
    *("wait_ranks", "wait_replies", "wait_rewards", "eval", "save", "report", "host"),
)
SMOOTHED_STEPS = 10  # of the running mean that is drawn over the single steps
Lines = list[dict[str, Any]]  # of metrics.jsonl: the numbers of each step
Runs = list[tuple[str, Lines]]  # each with its name


def read_run(name: str) -> tuple[str, Lines]:
    """A run's name and the numbers of its steps. Raises InputError if it has no steps."""
    folder = find_run(name, "metrics.jsonl")
    lines, damaged = read_metrics(folder / "metrics.jsonl")
    for number in damaged:
        print(f"note: {folder}/metrics.jsonl:{number} is not a whole line and is left out", file=sys.stderr)
    if not lines:
        raise InputError(f"{folder}/metrics.jsonl has no steps yet")
    return folder.resolve().name, lines


def series(lines: Lines, metric: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, where it is there and finite."""
    points = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]
    return [step for step, _ in points], [value for _, value in points]


def running_mean(values: list[float], width: int) -> list[float]:
    """Each value's mean with up to `width` - 1 values before it."""
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def draw_lines(axes: Any, runs: Runs, title: str, metric: str) -> None:
    """Draw a metric of all runs that have it."""
    axes.set_title(title, loc="left", fontsize=11)
    for i, (name, lines) in enumerate(runs):
        steps, values = series(lines, metric)
        axes.plot(steps, values, color=f"C{i}", alpha=0.25, linewidth=0.8)
        axes.plot(steps, running_mean(values, SMOOTHED_STEPS), color=f"C{i}", linewidth=1.8, label=name)
    if not any(series(lines, metric)[0] for _, lines in runs):
        axes.text(0.5, 0.5, f"no {metric}", ha="center", transform=axes.transAxes)


def draw_held_out(axes: Any, runs: Runs) -> None:
    """Mark each evaluation on the held-out rows, at step 0 the one before training."""
    for i, (_, lines) in enumerate(runs):
        steps, values = series(lines, "eval/reward")
        _, before = series(lines, "eval/before")
        steps, values = [0] * len(before) + steps, before + values
        label = "held out" if i == 0 and steps else None
        axes.plot(steps, values, "o", color=f"C{i}", markersize=5, markeredgecolor="white", label=label)


def stack_of_causes(lines: Lines) -> dict[str, list[float]]:
    """The seconds of each step by cause, as running means; only the causes that the run has, a fork's own ones last."""
    found = {name.removeprefix("time/") for line in lines for name in line if name.startswith("time/")}
    own = sorted(found - {*CAUSES, "step"})
    stack = {}
    for cause in [*(cause for cause in CAUSES if cause in found), *own]:
        seconds = [line.get(f"time/{cause}") or 0.0 for line in lines]  # none in the steps without it
        stack[cause] = running_mean(seconds, SMOOTHED_STEPS)
    return stack


def draw_time(axes: Any, name: str, lines: Lines) -> None:
    """The seconds of a run's steps by cause, one upon the other."""
    from matplotlib.colors import hsv_to_rgb

    axes.set_title(f"seconds of a step\n{name}", loc="left", fontsize=9)
    stack = stack_of_causes(lines)
    if not stack:
        return
    # A hue each; neighbours also differ in brightness.
    colors = [hsv_to_rgb((i / len(stack), 0.65, 0.6 + 0.3 * (i % 2))) for i in range(len(stack))]
    steps = [line["step"] for line in lines]
    axes.stackplot(steps, *stack.values(), labels=list(stack), colors=colors, linewidth=0)
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # room for the legend
    axes.legend(ncols=4, fontsize=7, frameon=False, loc="upper left", columnspacing=1.0)


def draw(runs: Runs) -> Any:
    """The picture, a figure of matplotlib."""
    from matplotlib.figure import Figure

    has_reference = any(series(lines, "policy/kl_ref_k3")[0] for _, lines in runs)
    kl = ("reference", "ref") if has_reference else ("policy before the update", "old")
    panels = [
        ("reward", "reward/mean"),
        ("entropy (nats per token)", "policy/entropy"),
        (f"KL to the {kl[0]} (k3)", f"policy/kl_{kl[1]}_k3"),
        ("completion tokens", "len/mean"),
        ("greatest gap of sampled to training logprobs", "policy/logp_gap_max"),
    ]
    num_axes = len(panels) + len(runs)
    num_rows = math.ceil(num_axes / 3)
    figure = Figure(figsize=(13, 3.5 * num_rows), layout="constrained")
    grid = [figure.add_subplot(num_rows, 3, number) for number in range(1, num_axes + 1)]
    for axes, (title, metric) in zip(grid, panels, strict=False):
        draw_lines(axes, runs, title, metric)
    draw_held_out(grid[0], runs)
    grid[0].legend(fontsize=8, frameon=False, loc="lower right")
    for axes, (name, lines) in zip(grid[len(panels) :], runs, strict=True):
        draw_time(axes, name, lines)
    for axes in grid:
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m minirl.plot", description="Draw runs into one picture.")
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's folder, or its name in ./runs or $MINIRL_RUNS"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs.png"), help="the picture (default: runs.png)"
    )
    arguments = parser.parse_args()
    try:
        runs = [read_run(name) for name in arguments.runs]
        draw(runs).savefig(arguments.output, dpi=80)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ImportError:
        print("error: matplotlib is not installed: pip install -e '.[plot]'", file=sys.stderr)
        return InputError.exit_code
    print(f"drew {', '.join(name for name, _ in runs)} into {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
