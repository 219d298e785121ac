"""Run benchmarks alternately (A B A B ...) and compare their RESULT lines per round, for machines with noisy timing.

    python benchmarks/compare.py --rounds 3 --metric useful_tok_cpu_s \
        "python benchmarks/generate.py MODEL" "python benchmarks/generate.py MODEL --dtype bfloat16"

A command is any program that prints a line with RESULT and a JSON object; its last RESULT line counts. Ratios are
relative to the first command in the same round.
"""

import argparse
import json
import shlex
import subprocess
from statistics import median


def result_of(command: str, timeout_s: float) -> dict:
    """Run a command and return the object on its RESULT line. Raises RuntimeError if it prints no result."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=timeout_s)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"no RESULT line from: {command}\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def spread(values: list[float]) -> str:
    """Format the median and range of values."""
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def print_comparison(metric: str, commands: list[str], results: list[list[dict]]) -> None:
    """Print one line per command. results: [command][round]; the first command is the baseline."""
    num_rounds = len(results[0])
    print(f"\n{metric}: median (range), ratio to the first: median (range), {num_rounds} rounds")
    for command, found in zip(commands, results, strict=True):
        values = []
        ratios = []
        for result, base in zip(found, results[0], strict=True):
            value = result.get(metric)
            base_value = base.get(metric)
            if value is None or base_value is None:  # the run did not reach this level
                continue
            values.append(value)
            if base_value:
                ratios.append(value / base_value)
        if values:
            note = "" if len(values) == num_rounds else f"  ({len(values)} of the rounds)"
            print(f"  {spread(values)}  ratio {spread(ratios)}  {command}{note}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="+", help="quoted commands; the first is the baseline")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--metric", action="append", help="figure to compare; repeatable (default: useful_tok_cpu_s)"
    )
    parser.add_argument("--timeout-s", type=float, default=900, help="timeout (s) per command (default: 900)")
    args = parser.parse_args()
    metrics = args.metric or ["useful_tok_cpu_s"]
    results: list[list[dict]] = [[] for _ in args.commands]
    for number in range(args.rounds):
        for command, found in zip(args.commands, results, strict=True):
            result = result_of(command, args.timeout_s)
            found.append(result)
            values = "  ".join(f"{metric} {result.get(metric)}" for metric in metrics)
            print(f"round {number + 1}  {result.get('what')}  {values}", flush=True)
    for metric in metrics:
        print_comparison(metric, args.commands, results)


if __name__ == "__main__":
    main()
