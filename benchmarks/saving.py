"""The cost of saving: the wall seconds of `train_grpo.py` on two ranks with a checkpoint every N steps.

    python benchmarks/compare.py --metric step_s "python benchmarks/saving.py --num-steps 100 --save-every 0" \
        "python benchmarks/saving.py --num-steps 100 --save-every 50" \
        "python benchmarks/saving.py --num-steps 100 --save-every 5"

`step_s` is the time of all steps, `blocked_s` the part of it in which saving kept training waiting.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from workload import print_result, start_script


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--num-steps", type=int, default=300)
    args = parser.parse_args()
    flags = ["--run-name", "saving", "--num-steps", str(args.num_steps), "--save-every", str(args.save_every)]
    with tempfile.TemporaryDirectory() as runs:
        job = start_script("train_grpo.py", *flags, runs=runs, stdout=subprocess.DEVNULL)
        assert job.wait() == 0
        lines = (Path(runs) / "saving" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    # The last save comes after the last line: it delays no step.
    print_result(
        what=f"save every {args.save_every}",
        step_s=sum(step["time/step"] for step in steps),
        blocked_s=sum(step.get("time/save", 0.0) for step in steps),
    )


if __name__ == "__main__":
    main()
