"""Whether memory and disk stay bounded: resident memory and files of a run of N steps, every tenth of the way.

python benchmarks/long_run.py [--num-steps 500] [--script train_ppo.py]
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from workload import print_result, start_script


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
        flags += ["--run-name", "long"]
        job = start_script(arguments.script, *flags, runs=runs, ranks=1, stdout=subprocess.DEVNULL)
        folder, seen = Path(runs) / "long", []
        while job.poll() is None and len(seen) < 9:  # at the last tenth it ends
            time.sleep(0.2)
            lines = (
                (folder / "metrics.jsonl").read_text().count("\n")
                if (folder / "metrics.jsonl").exists()
                else 0
            )
            if lines >= (len(seen) + 1) * arguments.num_steps // 10:
                files = [path for path in folder.rglob("*") if path.is_file()]
                seen.append((lines, round(resident_mib(job.pid), 1), len(files)))
                print(f"step {lines}: {seen[-1][1]} MiB resident, {len(files)} files", flush=True)
        assert job.wait() == 0
    print_result(what="long run", growth_mib=seen[-1][1] - seen[1][1], seen=seen)


if __name__ == "__main__":
    main()
