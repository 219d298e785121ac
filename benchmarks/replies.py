"""The cost of waiting for replies: 256 episodes of 4 turns, whose environment takes 50 ms for each of 3 replies.

    python benchmarks/replies.py TOKENIZER [--seconds 0.05] [--no-async] [--workers 1] [--num-runs 3]

TOKENIZER is a Hugging Face folder with a small vocabulary; the model is a random one of 3M parameters. Runs
train_grpo.py on one CPU rank and prints the medians of a step's seconds by cause, and the share of the generation in
which the engine had something to decode. The first step of each run is left out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from overlap import SHAPE
from real_step import make_model
from workload import print_result, prompt_texts, seconds_by_cause, start_script

NUM_STEPS = 3
ENVIRONMENT = """
import asyncio, time

async def at_once(episode):
    yield episode.generate(max_tokens=32)
    for _ in range(3):
        await asyncio.sleep({seconds})
        yield episode.generate(after="reply ", max_tokens=32)

def in_turn(episode):
    yield episode.generate(max_tokens=32)
    for _ in range(3):
        time.sleep({seconds})
        yield episode.generate(after="reply ", max_tokens=32)
"""
# The causes of a step's time during which the engine works.
ENGINE = ("prefill", "decode")


def step_times(folder: Path, flags: list[str]) -> list[dict[str, float]]:
    """The seconds by cause of a run's steps without the first."""
    name = f"run{len(list(folder.glob('runs/run*')))}"
    flags = [*flags, "--run-name", name]
    run = start_script("train_grpo.py", *flags, runs=folder / "runs", ranks=1, stdout=subprocess.DEVNULL)
    if run.wait() != 0:
        sys.exit(f"the run failed, exit code {run.returncode}")
    return seconds_by_cause(folder / "runs" / name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--no-async", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--num-runs", type=int, default=3)
    args = parser.parse_args()

    steps = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        num_parameters = make_model(args.tokenizer, folder / "model", **SHAPE)
        rows = [json.dumps({"prompt": text, "answer": ""}) for text in prompt_texts(64)]
        (folder / "data.jsonl").write_text("\n".join(rows))
        (folder / "reward.py").write_text(
            "def length(completions):\n    return [float(len(c)) for c in completions]"
        )
        (folder / "environment.py").write_text(ENVIRONMENT.format(seconds=args.seconds))
        function = "in_turn" if args.no_async else "at_once"
        flags = f"""--model {folder}/model --data {folder}/data.jsonl --reward {folder}/reward.py:length --device cpu
            --rollout {folder}/environment.py:{function} --rollout-workers {args.workers} --num-steps {NUM_STEPS}
            --prompts-per-step 32 --group-size 8 --max-new-tokens 200 --lr 1e-5""".split()
        for _ in range(args.num_runs):
            steps += step_times(folder, flags)
    result = {}
    for cause in sorted({cause for step in steps for cause in step}):
        result[cause] = statistics.median(step.get(cause, 0.0) for step in steps)
        print(f"{cause} {result[cause]:.2f} s")
    engine_s = sum(result[cause] for cause in ENGINE)
    result["busy"] = engine_s / (engine_s + result["wait_replies"] + result["host"])
    print(f"busy {result['busy']:.2f}")
    print_result(num_parameters=num_parameters, seconds=args.seconds, function=function, **result)


if __name__ == "__main__":
    main()
