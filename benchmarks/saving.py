"""What saving costs a run: the wall seconds of `train_grpo.py` on two ranks with a checkpoint every N steps.

    python benchmarks/compare.py --metric step_s "python benchmarks/saving.py --num-steps 100 --save-every 0" \
        "python benchmarks/saving.py --num-steps 100 --save-every 50" \
        "python benchmarks/saving.py --num-steps 100 --save-every 5"
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from workload import print_result, start_script


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--num-steps", type=int, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        flags = ["--save-every", str(arguments.save_every), "--num-steps", str(arguments.num_steps)]
        job = start_script(
            "train_grpo.py", "--run-name", "saving", *flags, runs=runs, stdout=subprocess.DEVNULL
        )
        assert job.wait() == 0
        lines = [
            json.loads(line) for line in (Path(runs) / "saving" / "metrics.jsonl").read_text().splitlines()
        ]
    # The last save is after the last line: it ends the run and delays no step.
    result = dict(
        step_s=sum(line["time/step"] for line in lines), blocked_s=sum(line["time/save"] for line in lines)
    )
    print_result(what=f"save every {arguments.save_every}", **result)


if __name__ == "__main__":
    main()
