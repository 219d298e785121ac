"""The cost of waiting for replies: 256 episodes of 4 turns, whose environment takes 50 ms for each of 3 replies.

    python benchmarks/replies.py MODEL [--seconds 0.05] [--threads] [--num-runs 3]
        [--slow-seconds 10] [--reward-seconds 5] [--num-steps 3] [--max-staleness 2]

MODEL is a Hugging Face folder, preferably of random weights. Runs
train_grpo.py on one CPU rank and prints the means of a step's seconds by cause, the share of the generation in which
the engine had something to decode, and the tokens that are trained on a second. The first third of each run's steps is
left out. --slow-seconds: of one reply in 32. --reward-seconds: of the reward of a prompt's completions.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from workload import print_result, prompt_texts, seconds_by_cause, start_script

ENVIRONMENT = """
import asyncio, random, time

def seconds():
    return {slow_seconds} if random.random() < 1 / 32 else {seconds}

async def at_once(episode):
    await episode.generate(max_tokens=32)
    for _ in range(3):
        await asyncio.sleep(seconds())
        await episode.generate(after="reply ", max_tokens=32)

async def in_threads(episode):
    await episode.generate(max_tokens=32)
    for _ in range(3):
        await asyncio.to_thread(time.sleep, seconds())
        await episode.generate(after="reply ", max_tokens=32)
"""
REWARD = """
import time

def length(completions):
    time.sleep({reward_seconds})
    return [float(len(completion)) for completion in completions]
"""
# The causes of a step's time during which the engine works.
ENGINE = ("prefill", "decode")


def step_figures(folder: Path, flags: list[str]) -> list[dict[str, float]]:
    """By step of a run, without the first third: the trained tokens, and the seconds by cause."""
    name = f"run{len(list(folder.glob('runs/run*')))}"
    flags = [*flags, "--run-name", name]
    run = start_script("train_grpo.py", *flags, runs=folder / "runs", ranks=1, stdout=subprocess.DEVNULL)
    if run.wait() != 0:
        sys.exit(f"the run failed, exit code {run.returncode}")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    steps = [{"tokens": json.loads(line)["count/tokens"]} for line in lines[1:]]
    for step, seconds in zip(steps, seconds_by_cause(folder / "runs" / name), strict=True):
        step.update(seconds)
    return steps[len(lines) // 3 - 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--slow-seconds", type=float)
    parser.add_argument("--reward-seconds", type=float, default=0.0)
    parser.add_argument("--threads", action="store_true")
    parser.add_argument("--num-runs", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--max-staleness", type=int, default=0)
    args = parser.parse_args()

    steps = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = [json.dumps({"prompt": text, "answer": ""}) for text in prompt_texts(64)]
        (folder / "data.jsonl").write_text("\n".join(rows))
        (folder / "reward.py").write_text(REWARD.format(reward_seconds=args.reward_seconds))
        slow_seconds = args.slow_seconds or args.seconds
        (folder / "environment.py").write_text(
            ENVIRONMENT.format(seconds=args.seconds, slow_seconds=slow_seconds)
        )
        function = "in_threads" if args.threads else "at_once"
        flags = f"""--model {args.model} --data {folder}/data.jsonl --reward {folder}/reward.py:length
            --rollout {folder}/environment.py:{function} --num-steps {args.num_steps}
            --prompts-per-step 32 --group-size 8 --max-new-tokens 200
            --lr 1e-5 --max-staleness {args.max_staleness}""".split()
        for _ in range(args.num_runs):
            steps += step_figures(folder, flags)
    result = {}
    for cause in sorted({cause for step in steps for cause in step}):
        result[cause] = statistics.fmean(step.get(cause, 0.0) for step in steps)
        print(f"{cause} {result[cause]:.2f}")
    engine_s = sum(result[cause] for cause in ENGINE)
    result["busy"] = engine_s / (engine_s + result["wait_replies"] + result["host"])
    result["tokens_per_s"] = result["tokens"] / result["step"]
    print(f"busy {result['busy']:.2f}")
    print_result(function=function, max_staleness=args.max_staleness, **result)


if __name__ == "__main__":
    main()
