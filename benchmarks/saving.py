"""What saving costs a run: the wall seconds of `train_grpo.py` on two ranks with a checkpoint every N steps.

    python benchmarks/compare.py --metric step_s "python benchmarks/saving.py --num-steps 100 --save-every 0" \
        "python benchmarks/saving.py --num-steps 100 --save-every 50" \
        "python benchmarks/saving.py --num-steps 100 --save-every 5"
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--num-steps", type=int, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [str(ROOT / "train_grpo.py"), "--run-name", "saving", "--save-every", str(arguments.save_every)]
        command += ["--num-steps", str(arguments.num_steps)]
        environment = {**os.environ, "MINIRL_RUNS": runs, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        lines = [json.loads(line) for line in (Path(runs) / "saving" / "metrics.jsonl").read_text().splitlines()]
    # The last save is after the last line: it ends the run and delays no step.
    result = dict(step_s=sum(line["time/step"] for line in lines), blocked_s=sum(line["time/save"] for line in lines))
    print("RESULT", json.dumps(dict(what=f"save every {arguments.save_every}", **result)))


if __name__ == "__main__":
    main()
