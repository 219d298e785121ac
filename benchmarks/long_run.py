"""Do memory and disk use stay bounded? Resident memory and number of files at each tenth of a long run.

python benchmarks/long_run.py [--num-steps 500] [--script train_ppo.py]
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from workload import print_result, start_script

FLAGS = (
    *("--run-name", "long"),
    *("--prompts-per-step", "4"),
    *("--save-every", "10"),
    *("--eval-every", "100"),
)


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def count_steps(folder: Path) -> int:
    """The steps that a run has finished."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-steps", type=int, default=500)
    parser.add_argument("--script", default="train_grpo.py")
    args = parser.parse_args()
    flags = ["--num-steps", str(args.num_steps), *FLAGS]
    with tempfile.TemporaryDirectory() as runs:
        job = start_script(args.script, *flags, runs=runs, ranks=1, stdout=subprocess.DEVNULL)
        folder = Path(runs) / "long"
        seen: list[tuple[int, float, int]] = []  # steps, resident MiB, files
        while job.poll() is None and len(seen) < 9:  # at the last tenth the process ends
            time.sleep(0.2)
            num_steps = count_steps(folder)
            next_step = (len(seen) + 1) * args.num_steps // 10
            if num_steps >= next_step:
                num_files = sum(path.is_file() for path in folder.rglob("*"))
                resident = round(resident_mib(job.pid), 1)
                seen.append((num_steps, resident, num_files))
                print(f"step {num_steps}: {resident} MiB resident, {num_files} files", flush=True)
        assert job.wait() == 0
    # The first tenth is a warm-up and does not count.
    growth_mib = seen[-1][1] - seen[1][1]
    print_result(what="long run", growth_mib=growth_mib, seen=seen)


if __name__ == "__main__":
    main()
