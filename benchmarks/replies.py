"""Measure the cost of waiting for replies: 256 episodes of 4 turns, with 50 ms per environment reply.

    python benchmarks/replies.py MODEL [--seconds 0.05] [--threads] [--slow-seconds 10] [--reward-seconds 5]
        [--num-steps 9] [--max-staleness 2]

MODEL is a Hugging Face folder, preferably with random weights. Runs train_grpo.py on one CPU rank, and prints each
cause's mean seconds per step and the trained tokens per second. Skips the first third of the steps. --slow-seconds:
delay of one reply in 32. --reward-seconds: delay of the reward for a prompt's completions.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from workload import docstring_parser, print_figures, print_result, prompt_texts, start_script

FUNCTIONS = """
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

def length(completions):
    time.sleep({reward_seconds})
    return [float(len(completion)) for completion in completions]
"""


def main() -> None:
    parser = docstring_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--slow-seconds", type=float)
    parser.add_argument("--reward-seconds", type=float, default=0.0)
    parser.add_argument("--threads", action="store_true")
    parser.add_argument("--num-steps", type=int, default=9)
    parser.add_argument("--max-staleness", type=int, default=0)
    args = parser.parse_args()

    function = "in_threads" if args.threads else "at_once"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = [json.dumps({"prompt": text}) for text in prompt_texts(64)]
        (folder / "data.jsonl").write_text("\n".join(rows))
        functions = FUNCTIONS.format(
            seconds=args.seconds,
            slow_seconds=args.slow_seconds or args.seconds,
            reward_seconds=args.reward_seconds,
        )
        (folder / "functions.py").write_text(functions)
        flags = f"""--model {args.model} --data {folder}/data.jsonl --reward {folder}/functions.py:length
            --rollout {folder}/functions.py:{function} --num-steps {args.num_steps} --run-name replies
            --prompts-per-step 32 --group-size 8 --max-new-tokens 200
            --lr 1e-5 --max-staleness {args.max_staleness}""".split()
        run = start_script("train_grpo.py", *flags, runs=folder, ranks=1, stdout=subprocess.DEVNULL)
        if run.wait() != 0:
            sys.exit(f"the run failed, exit code {run.returncode}")
        lines = (folder / "replies" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines[len(lines) // 3 :]]
    causes = sorted({name for step in steps for name in step if name.startswith("time/")})
    result = {cause: fmean(step.get(cause, 0.0) for step in steps) for cause in causes}
    result["tokens_per_s"] = fmean(step["count/tokens"] for step in steps) / result["time/step"]
    print_figures(result)
    print_result(what=f"replies {function}", max_staleness=args.max_staleness, **result)


if __name__ == "__main__":
    main()
