"""How soon a model learns: CPU seconds and steps until the reward reaches a level. On one rank.

    OMP_NUM_THREADS=1 python benchmarks/learn.py MODEL [--seed 1] [--csv CURVE.csv]
    python benchmarks/learn.py CURVE.csv --read

MODEL is a Hugging Face folder, best of random weights: the reward is the share of the letter e. The recipe: the same
prompts every step (`workload.prompt_texts`), advantages normalised by the group's std + 1e-4 (ddof 1), token-mean loss,
one update per batch (so the ratio is 1 and no clip acts), no KL, AdamW (0.9, 0.999) without decay, constant rate,
gradient norm clipped to 1, fp32. A level is reached when the mean reward of 10 steps in a row reaches it; seconds count
from the first step, models being loaded.

A CSV needs the columns step, cpu_seconds, reward and mean_len; --read gives its RESULT line, whoever wrote it. So that
`compare.py` can run another trainer on this recipe, and take the ratio of what it wrote:

    python benchmarks/compare.py --metric cpu_s_to_0.5 --metric step_to_0.5 "python benchmarks/learn.py MODEL" \
        'sh -c "python OTHER.py MODEL --csv other.csv && python benchmarks/learn.py other.csv --read"'
"""

import argparse
import csv
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from grpo_step import GrpoLoop, make_parser
from workload import print_result, print_row

from minirl.ranks import process_group

LEVELS, SPAN = (0.3, 0.5, 0.7, 0.8), 10
STD_EPS = 1e-4  # as TRL's; minirl's scripts add 1e-6
NOISE_STRIDE = 10_000  # steps between the sampling noise of two seeds


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.set_defaults(max_new=128, lr=1e-3, steps=30)
    parser.add_argument("--seed", type=int, default=0, help="of the sampling noise")
    parser.add_argument("--csv", type=Path, help="write the curve there")
    parser.add_argument(
        "--read", action="store_true", help="MODEL is the CSV of an earlier run: report on that"
    )
    return parser.parse_args()


def learn(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Train; one row per step."""
    loop = GrpoLoop(args)
    loop.config = dataclasses.replace(loop.config, advantage_eps=STD_EPS)
    loop.optimizer = loop.policy.make_optimizer(betas=(0.9, 0.999), weight_decay=0.0)
    start = time.process_time()
    for step in range(args.steps):
        rollouts = loop.generate(args.seed * NOISE_STRIDE + step)
        rewards = loop.reward(rollouts)
        batch, microbatches = loop.score(rollouts, rewards)
        loop.backward(batch, microbatches)
        loop.step()
        yield {
            "step": step + 1,
            "cpu_seconds": time.process_time() - start,
            "reward": sum(rewards) / len(rewards),
            "mean_len": sum(len(rollout.completion) for rollout in rollouts) / len(rollouts),
        }


def read(path: Path) -> list[dict[str, float]]:
    """The rows of a curve."""
    with path.open(newline="") as file:
        names = ("step", "cpu_seconds", "reward", "mean_len")
        return [{name: float(row[name]) for name in names} for row in csv.DictReader(file)]


def first_at(rows: list[dict[str, float]], level: float) -> dict[str, float] | None:
    """The row at which the mean reward of the last SPAN rows first reaches the level."""
    for i in range(SPAN, len(rows) + 1):
        if sum(row["reward"] for row in rows[i - SPAN : i]) / SPAN >= level:
            return rows[i - 1]
    return None


def main() -> None:
    args, rows = parse_args(), []
    for row in read(args.model) if args.read else learn(args):
        print_row(row)
        rows.append(row)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    reached = {level: first_at(rows, level) for level in LEVELS}
    print_result(
        what=f"curve {args.model.name}" if args.read else "minirl_learn",
        seed=None if args.read else args.seed,
        steps=len(rows),
        **{f"cpu_s_to_{level}": row and row["cpu_seconds"] for level, row in reached.items()},
        **{f"step_to_{level}": row and int(row["step"]) for level, row in reached.items()},
        last10=sum(row["reward"] for row in rows[-SPAN:]) / SPAN,
        cpu_s=rows[-1]["cpu_seconds"],
    )


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():  # not with --read
        process_group.stop()
