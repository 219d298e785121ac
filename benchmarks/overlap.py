"""How much overlap hides: steps with a slow reward, a reference model, and 4 of 64 completions ten times as long.

    python benchmarks/overlap.py TOKENIZER [--base CHECKOUT] [--per call] [--workers 4] [--num-runs 3]

TOKENIZER is a Hugging Face folder with a small vocabulary; the model is a random one of 3M parameters. Runs
train_grpo.py on two CPU ranks, in turns with that of another checkout of minirl (`--base`), and prints the medians of a
step's seconds by cause. The first step of each run is left out. `--per completion`: the reward sleeps 60 ms for
each.
"""

import argparse
import dataclasses
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORT, LONG = 64, 640
NUM_STEPS = 4
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
REWARD = """
import time

def slow(completions):
    time.sleep({seconds})
    return [text.count("e") / max(1, len(text)) for text in completions]
"""


def run_skewed() -> None:
    """Under torchrun: a script whose training completions have given lengths. sys.argv: the script and its flags."""
    from minirl.data.prompts import PromptStream

    # Older checkouts use another name.
    name = "request" if hasattr(PromptStream, "request") else "_request"
    original = getattr(PromptStream, name)

    def request(stream, rollout_id, *args):  # type: ignore[no-untyped-def]
        is_long = rollout_id.prompt_ordinal % 2 == 0 and rollout_id.sample == 3
        limit = LONG if is_long else SHORT
        return dataclasses.replace(
            original(stream, rollout_id, *args), max_new_tokens=limit, stop_ids=frozenset()
        )

    setattr(PromptStream, name, request)
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def step_times(checkout: Path, folder: Path, flags: list[str]) -> list[dict[str, float]]:
    """Seconds by cause of each step of a run of this checkout, without the first."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "MINIRL_RUNS": str(folder / "runs"),
        "OMP_NUM_THREADS": "1",
    }
    from workload import seconds_by_cause

    name = f"run{len(list(folder.glob('runs/run*')))}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [__file__, "--skewed", str(checkout / "train_grpo.py"), *flags, "--run-name", name]
    subprocess.run([*torchrun, *script], env=environment, check=True, stdout=subprocess.DEVNULL)
    return seconds_by_cause(folder / "runs" / name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--per", choices=("call", "completion"), default="call")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--num-runs", type=int, default=3)
    args = parser.parse_args()

    from real_step import make_model
    from workload import print_result, prompt_texts

    checkouts = {"here": ROOT} | ({} if args.base is None else {"base": args.base.resolve()})
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        num_parameters = make_model(args.tokenizer, folder / "model", **SHAPE)
        rows = [json.dumps({"prompt": text, "answer": ""}) for text in prompt_texts(64)]
        (folder / "data.jsonl").write_text("\n".join(rows))
        slept = "0.5" if args.per == "call" else "0.06 * len(completions)"
        (folder / "reward.py").write_text(REWARD.format(seconds=slept))
        flags = ["--model", str(folder / "model"), "--data", str(folder / "data.jsonl")]
        flags += [
            "--reward",
            f"{folder / 'reward.py'}:slow",
            "--kl-coef",
            "0.01",
            "--num-steps",
            str(NUM_STEPS),
        ]
        flags += [
            "--prompts-per-step",
            "8",
            "--group-size",
            "8",
            "--max-new-tokens",
            str(LONG),
            "--lr",
            "1e-5",
        ]
        for _ in range(args.num_runs):
            for name, checkout in checkouts.items():
                more = ["--workers", str(args.workers)] if name == "here" else []
                found[name] += step_times(checkout, folder, flags + more)
    result: dict[str, float] = {}
    for name, steps in found.items():
        for cause in sorted({cause for step in steps for cause in step}):
            seconds = statistics.median(step.get(cause, 0.0) for step in steps)
            result[f"{name}/{cause}"] = seconds
            print(f"{name}: {cause} {seconds:.2f} s")
    if args.base is not None:
        result["ratio"] = result["here/step"] / result["base/step"]
    print_result(num_parameters=num_parameters, per=args.per, **result)


if __name__ == "__main__":
    run_skewed() if sys.argv[1:2] == ["--skewed"] else main()
