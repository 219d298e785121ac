"""One picture of one or several runs: `python -m minirl.plot RUN [RUN ...]`.

RUN is a run's folder, or its name in ./runs or $MINIRL_RUNS. Drawn from metrics.jsonl: reward and held-out score,
entropy, KL divergence, lengths, the gap between sampling and training, and where the time went. Needs matplotlib:
pip install -e '.[plot]'.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from minirl.errors import InputError
from minirl.report.logger import read_metrics
from minirl.run.run_folder import runs_root

PHASES = ("generate", "reward", "score", "update", "report")
COLORS = ("#3b6fb6", "#d9822b", "#3f9b6b", "#b5485d", "#7b5ea7", "#5f6b76")
SMOOTHED_STEPS = 10  # of the running mean that is drawn over the single steps


def read_run(name: str) -> tuple[str, list[dict[str, Any]]]:
    """A run's name and the numbers of its steps. Raises InputError where there are none."""
    folders = [Path(name), runs_root() / name]
    folder = next((path for path in folders if (path / "metrics.jsonl").is_file()), None)
    if folder is None:
        raise InputError(
            f"{name}: no metrics.jsonl in {folders[0]} or {folders[1]}; give a run's folder or name"
        )
    lines, damaged = read_metrics(folder / "metrics.jsonl")
    for number in damaged:
        print(f"note: {folder}/metrics.jsonl:{number} is no whole line and is left out", file=sys.stderr)
    if not lines:
        raise InputError(f"{folder}/metrics.jsonl has no steps yet")
    return folder.resolve().name, lines


def series(lines: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, where it is there and finite."""
    points = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]
    return [step for step, _ in points], [value for _, value in points]


def running_mean(values: list[float], width: int) -> list[float]:
    """Each value's mean with up to `width` - 1 values before it."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means


def draw_lines(
    axes: Any, runs: list[tuple[str, list[dict[str, Any]]]], metric: str, *, is_smooth: bool
) -> bool:
    """Draw a metric of all runs; returns whether any has it."""
    is_there = False
    for i, (name, lines) in enumerate(runs):
        steps, values = series(lines, metric)
        if not steps:
            continue
        is_there = True
        color = COLORS[i % len(COLORS)]
        if is_smooth and len(values) > SMOOTHED_STEPS:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            values = running_mean(values, SMOOTHED_STEPS)
        axes.plot(steps, values, color=color, linewidth=1.8, label=name)
    return is_there


def draw_held_out(axes: Any, runs: list[tuple[str, list[dict[str, Any]]]]) -> None:
    """Mark each evaluation on the held-out rows."""
    for i, (_, lines) in enumerate(runs):
        steps, values = series(lines, "eval/reward")
        label = "held out" if i == 0 and steps else None
        color = COLORS[i % len(COLORS)]
        axes.plot(steps, values, "o", color=color, markersize=5, markeredgecolor="white", label=label)


def draw_time(axes: Any, runs: list[tuple[str, list[dict[str, Any]]]]) -> None:
    """A bar per run: the mean seconds of a step by phase."""
    left = [0.0] * len(runs)
    for i, phase in enumerate(PHASES):
        widths = []
        for _, lines in runs:
            _, seconds = series(lines, f"time/{phase}")
            widths.append(sum(seconds) / len(lines))
        axes.barh(range(len(runs)), widths, left=left, color=COLORS[i], label=phase, height=0.5)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(runs)), [name for name, _ in runs])
    axes.set_ylim(-0.6, len(runs) + 0.2)
    axes.invert_yaxis()
    axes.legend(ncols=3, fontsize=8, frameon=False, loc="lower right")


def draw(runs: list[tuple[str, list[dict[str, Any]]]], output: Path) -> None:
    """Draw the picture into a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
    panels = [
        ("reward", "reward/mean", True),
        ("entropy (nats per token)", "policy/entropy", True),
        ("KL to the reference (k3)", "policy/kl_ref_k3", True),
        ("completion tokens", "len/mean", True),
        ("gradient norm", "optim/grad_norm", True),
    ]
    if not any(series(lines, "policy/kl_ref_k3")[0] for _, lines in runs):
        panels[2] = ("KL to the policy before the update (k3)", "policy/kl_old_k3", True)
    for axes, (title, metric, is_smooth) in zip(grid.flat, panels, strict=False):
        if not draw_lines(axes, runs, metric, is_smooth=is_smooth):
            axes.text(0.5, 0.5, f"no {metric}", ha="center", transform=axes.transAxes)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("step")
    draw_held_out(grid.flat[0], runs)
    grid.flat[0].legend(fontsize=8, frameon=False, loc="lower right")
    draw_time(grid.flat[5], runs)
    grid.flat[5].set_title("where the time went (seconds a step)", loc="left", fontsize=11)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(output, dpi=80)


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
        draw(runs, arguments.output)
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
