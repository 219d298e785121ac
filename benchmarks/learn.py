"""Measure how fast a model learns: CPU seconds and steps until the reward reaches a level, on one rank.

    OMP_NUM_THREADS=1 python benchmarks/learn.py MODEL [--seed 1] [--csv CURVE.csv]
    python benchmarks/learn.py CURVE.csv --read

MODEL is a Hugging Face folder, preferably with random weights: the reward is the fraction of the letter e. The recipe:
the same prompts every step (`workload.prompt_texts`), advantages divided by the group's std + 1e-4 (ddof 1), token-mean
loss, one update per batch (so the ratio is 1 and the clip is inactive), no KL, AdamW (0.9, 0.999) without weight decay,
constant learning rate, gradient norm clipped to 1, fp32. A model reaches a level when its mean reward over 10
consecutive steps does. Seconds count from the first step, after the models are loaded.

A CSV needs the columns step, cpu_seconds, reward and mean_len. --read prints the RESULT line for any trainer's CSV, so
that `compare.py` can run another trainer on this recipe:

    python benchmarks/compare.py --metric cpu_s_to_0.5 --metric step_to_0.5 "python benchmarks/learn.py MODEL" \
        'sh -c "python OTHER.py MODEL --csv other.csv && python benchmarks/learn.py other.csv --read"'
"""

import argparse
import csv
import functools
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_step import GrpoLoop, make_step_parser, train_grpo
from workload import print_figures, print_result

from minirl.ranks import launch
from minirl.training.advantages import group_advantages

LEVELS = (0.3, 0.5, 0.7, 0.8)  # levels of the mean reward
SPAN = 10  # steps to average over
STD_EPS = 1e-4  # like TRL; minirl's scripts add 1e-6
NOISE_STRIDE = 10_000  # a seed uses the sampling noise of the steps from seed x NOISE_STRIDE on
COLUMNS = ("step", "cpu_seconds", "reward", "mean_len")


def parse_args() -> argparse.Namespace:
    parser = make_step_parser(__doc__)
    parser.set_defaults(max_new=128, lr=1e-3, steps=30)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling noise (default: 0)")
    parser.add_argument("--csv", type=Path, help="file to write the curve to")
    parser.add_argument(
        "--read", action="store_true", help="report on an earlier run, whose CSV is given as MODEL"
    )
    return parser.parse_args()


def learn(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Train, and yield a point of the curve (values of COLUMNS) after each step."""
    loop = GrpoLoop(args)
    train_grpo.group_advantages = functools.partial(group_advantages, eps=STD_EPS)
    loop.optimizer = loop.policy.make_optimizer(betas=(0.9, 0.999), weight_decay=0.0)
    start = time.process_time()
    for step in range(args.steps):
        rollouts = loop.generate(args.seed * NOISE_STRIDE + step)
        rewards = loop.reward(rollouts)
        batch, microbatches = loop.score(rollouts, rewards)
        loop.backward(batch, microbatches)
        loop.step()
        num_sampled = sum(len(rollout.completion) for rollout in rollouts)
        yield {
            "step": step + 1,
            "cpu_seconds": time.process_time() - start,
            "reward": sum(rewards) / len(rewards),
            "mean_len": num_sampled / len(rollouts),
        }


def read(path: Path) -> Iterator[dict[str, float]]:
    """Yield the points of a curve from its CSV."""
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            yield {name: float(line[name]) for name in COLUMNS}


def write(path: Path, curve: list[dict[str, float]]) -> None:
    """Write a curve to a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(curve)


def mean_reward(points: list[dict[str, float]]) -> float:
    """Return the mean reward of SPAN points."""
    return sum(point["reward"] for point in points) / SPAN


def first_at(curve: list[dict[str, float]], level: float) -> dict[str, float] | None:
    """Return the first point at which the mean reward over the last SPAN points reaches the level."""
    for end in range(SPAN, len(curve) + 1):
        if mean_reward(curve[end - SPAN : end]) >= level:
            return curve[end - 1]
    return None


def main() -> None:
    args = parse_args()
    curve = []
    for point in read(args.model) if args.read else learn(args):
        print_figures(point)
        curve.append(point)
    if args.csv:
        write(args.csv, curve)
    reached: dict[str, float | None] = {}
    for level in LEVELS:
        point = first_at(curve, level)
        reached[f"cpu_s_to_{level}"] = None if point is None else point["cpu_seconds"]
        reached[f"step_to_{level}"] = None if point is None else int(point["step"])
    print_result(
        what=f"curve {args.model.name}" if args.read else "minirl_learn",
        seed=None if args.read else args.seed,
        steps=len(curve),
        **reached,
        last10=mean_reward(curve[-SPAN:]),
        cpu_s=curve[-1]["cpu_seconds"],
    )


if __name__ == "__main__":
    launch.run(main)
