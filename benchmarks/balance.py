"""How evenly an update's tokens are spread over the ranks, and how long the assignment takes.

No model and no process group.

    python benchmarks/balance.py [--sequences 512] [--ranks 8] [--max-tokens 8192]

Lengths are `shortest` + a geometric number, up to `longest`. Imbalance is tokens of the fullest rank / mean - 1: the
share of the time of an update that the average rank waits for the fullest, if time is proportional to tokens.
`plan_microbatches` ("planned") is compared with two ways to give every rank the same number of sequences: consecutive
ones ("contiguous") and every n-th one ("round_robin"). `used_frac` is tokens / (microbatches x --max-tokens), over all
ranks.
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
    rng = random.Random(seed)
    scale = math.log1p(-1 / args.mean)
    lengths = []
    for _ in range(args.sequences):
        # A geometric number of mean `args.mean`, by the inverse of its distribution function.
        geometric = 1 + int(math.log(1 - rng.random()) / scale)
        lengths.append(min(args.shortest + geometric, args.longest))
    return lengths


def imbalance(loads: Sequence[int]) -> float:
    """Greatest over mean load, less 1."""
    return max(loads) / mean(loads) - 1


def measure(
    lengths: Sequence[int], num_ranks: int, max_tokens: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Imbalance of each way to assign these lengths; the plan's milliseconds and how full its microbatches are."""
    start = time.perf_counter()
    plan = plan_microbatches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    plan_ms = 1e3 * (time.perf_counter() - start)
    num_microbatches = sum(len(microbatches) for microbatches in plan)
    costs = {"plan_ms": plan_ms, "used_frac": sum(lengths) / (num_microbatches * max_tokens)}

    contiguous = []
    round_robin = []
    planned = []
    for rank, microbatches in enumerate(plan):
        first = len(lengths) * rank // num_ranks
        end = len(lengths) * (rank + 1) // num_ranks
        contiguous.append(sum(lengths[first:end]))
        round_robin.append(sum(lengths[rank::num_ranks]))
        planned.append(sum(lengths[i] for sequences in microbatches for i in sequences))
    imbalances = {
        "contiguous": imbalance(contiguous),
        "round_robin": imbalance(round_robin),
        "planned": imbalance(planned),
    }
    return imbalances, costs


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a microbatch")
    parser.add_argument("--shortest", type=int, default=20)
    parser.add_argument("--mean", type=int, default=300, help="of the geometric part")
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--draws", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    imbalances = []
    costs = []
    for seed in range(args.draws):
        of_draw, cost = measure(draw_lengths(args, seed), args.ranks, args.max_tokens)
        imbalances.append(of_draw)
        costs.append(cost)
    result: dict[str, float] = {}
    print(f"imbalance of tokens over {args.ranks} ranks, {args.sequences} sequences, {args.draws} draws")
    for name in imbalances[0]:
        found = [of_draw[name] for of_draw in imbalances]
        print(f"  {name:12} mean {mean(found):.3%}  max {max(found):.3%}")
        result[f"{name}_mean"] = mean(found)
        result[f"{name}_max"] = max(found)
    for name in costs[0]:
        result[name] = median(cost[name] for cost in costs)
    print(f"plan: {result['plan_ms']:.3g} ms, microbatches filled to {result['used_frac']:.1%} (medians)")
    print_result(
        what="minirl_balance", sequences=args.sequences, ranks=args.ranks, draws=args.draws, **result
    )


if __name__ == "__main__":
    main()
