"""Whether memory and disk stay bounded: resident memory and files of a run of N steps, every tenth of the way.

python benchmarks/long_run.py [--num-steps 500] [--script train_ppo.py]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-steps", type=int, default=500)
    parser.add_argument("--script", default="train_grpo.py")
    arguments = parser.parse_args()
    flags = ["--num-steps", str(arguments.num_steps), "--prompts-per-step", "4", "--save-every", "10"]
    flags += ["--keep-rollouts", "20", "--eval-rows", "32", "--eval-every", "100"]
    with tempfile.TemporaryDirectory() as runs:
        environment = {**os.environ, "MINIRL_RUNS": runs, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ROOT / arguments.script), "--run-name", "long", *flags]
        job = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        folder, seen = Path(runs) / "long", []
        while job.poll() is None:
            time.sleep(0.2)
            lines = (folder / "metrics.jsonl").read_text().count("\n") if (folder / "metrics.jsonl").exists() else 0
            if lines >= (len(seen) + 1) * arguments.num_steps // 10 and job.poll() is None:
                files = [path for path in folder.rglob("*") if path.is_file()]
                seen.append((lines, round(resident_mib(job.pid), 1), len(files)))
                print(f"step {lines}: {seen[-1][1]} MiB resident, {len(files)} files", flush=True)
        assert job.returncode == 0
    print("RESULT", json.dumps(dict(what="long run", growth_mib=round(seen[-1][1] - seen[1][1], 1), seen=seen)))


if __name__ == "__main__":
    main()
