"""How evenly the plan of an update spreads tokens over ranks, and what the plan costs. No model, no process group.

    python benchmarks/balance.py [--sequences 512] [--ranks 8] [--max-tokens 8192]

Lengths are `shortest` + a geometric number, at most `longest`. Imbalance is tokens of the fullest rank / mean - 1: the
share of the time of an update that the average rank waits for the fullest, were time proportional to tokens. Against
`plan_microbatches` stand equal shares of the sequences in their order: end to end, and dealt in turn. `used_frac` is
tokens / (microbatches x budget), over all ranks.
"""

import argparse
import math
import random
import time
from collections.abc import Sequence
from statistics import mean, median

from workload import print_result

from minirl.training.assignment import plan_microbatches


def draw_lengths(args: argparse.Namespace, seed: int) -> list[int]:
    """Lengths of one step's sequences."""
    rng, scale = random.Random(seed), math.log1p(-1 / args.mean)
    geometric = (1 + int(math.log(1 - rng.random()) / scale) for _ in range(args.sequences))
    return [min(args.shortest + drawn, args.longest) for drawn in geometric]


def imbalance(loads: Sequence[int]) -> float:
    """Greatest over mean load, less 1."""
    return max(loads) / mean(loads) - 1


def measure(
    lengths: Sequence[int], num_ranks: int, max_tokens: int
) -> tuple[dict[str, float], dict[str, float]]:
    """The imbalance of each way to share these lengths; what the plan costs and how full its microbatches are."""
    cuts = [len(lengths) * rank // num_ranks for rank in range(num_ranks + 1)]
    start = time.perf_counter()
    plan = plan_microbatches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    plan_ms = 1e3 * (time.perf_counter() - start)
    sizes = [[sum(lengths[i] for i in micro) for micro in micros] for micros in plan]
    num_microbatches = sum(map(len, sizes))
    shared = {
        "contiguous": [sum(lengths[cuts[rank] : cuts[rank + 1]]) for rank in range(num_ranks)],
        "round_robin": [sum(lengths[rank::num_ranks]) for rank in range(num_ranks)],
        "planned": [sum(of_rank) for of_rank in sizes],
    }
    costs = {"plan_ms": plan_ms, "used_frac": sum(lengths) / (num_microbatches * max_tokens)}
    return {name: imbalance(loads) for name, loads in shared.items()}, costs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8192, help="budget of a microbatch")
    parser.add_argument("--shortest", type=int, default=20)
    parser.add_argument("--mean", type=int, default=300, help="of the geometric part")
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--draws", type=int, default=20)
    args = parser.parse_args()
    draws = [measure(draw_lengths(args, seed), args.ranks, args.max_tokens) for seed in range(args.draws)]
    result: dict[str, float] = {}
    print(f"imbalance of tokens over {args.ranks} ranks, {args.sequences} sequences, {args.draws} draws")
    for name in draws[0][0]:
        found = [shares[name] for shares, _ in draws]
        print(f"  {name:12} mean {mean(found):.3%}  max {max(found):.3%}")
        result |= {f"{name}_mean": mean(found), f"{name}_max": max(found)}
    costs = {name: median(cost[name] for _, cost in draws) for name in draws[0][1]}
    print(f"plan: {costs['plan_ms']:.3g} ms, microbatches filled to {costs['used_frac']:.1%} (medians)")
    print_result(
        what="minirl_balance", sequences=args.sequences, ranks=args.ranks, draws=args.draws, **result, **costs
    )


if __name__ == "__main__":
    main()
