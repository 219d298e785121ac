"""Run benchmarks in turn (A B A B ...) and compare their RESULT lines pair by pair, as a noisy machine demands.

    python benchmarks/compare.py --rounds 3 --metric useful_tok_cpu_s \
        "python benchmarks/generate.py MODEL" "python benchmarks/generate.py MODEL --dtype bfloat16"

A command is any program whose last line that begins with RESULT goes on with a JSON object. The ratios are to the first
command, round by round.
"""

import argparse
import json
import shlex
import subprocess
from statistics import median


def result_of(command: str, timeout_s: float) -> dict:
    """Run a command to its end; the object on its RESULT line. Raises RuntimeError with its errors if there is none."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=timeout_s)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"no RESULT line from: {command}\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="+", help="quoted; the first is the base")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--metric", action="append", help="may be given more than once (default useful_tok_cpu_s)"
    )
    parser.add_argument("--timeout-s", type=float, default=900)
    args = parser.parse_args()
    metrics = args.metric or ["useful_tok_cpu_s"]
    results: list[list[dict]] = [[] for _ in args.commands]
    for number in range(args.rounds):
        for command, found in zip(args.commands, results, strict=True):
            found.append(result_of(command, args.timeout_s))
            values = "  ".join(f"{metric} {found[-1].get(metric)}" for metric in metrics)
            print(f"round {number + 1}  {found[-1].get('what')}  {values}", flush=True)
    for metric in metrics:
        print(f"\n{metric}: median (range), ratio to the first: median (range), {args.rounds} rounds")
        for command, found in zip(args.commands, results, strict=True):
            pairs = [(a.get(metric), b.get(metric)) for a, b in zip(found, results[0], strict=True)]
            pairs = [pair for pair in pairs if None not in pair]  # null: not reached
            if pairs:
                rounds = "" if len(pairs) == args.rounds else f"  ({len(pairs)} of the rounds)"
                ratios = spread([a / b for a, b in pairs if b])
                print(f"  {spread([a for a, _ in pairs])}  ratio {ratios}  {command}{rounds}")


if __name__ == "__main__":
    main()
