"""Check correctness and speed on a GPU, unattended.

    python benchmarks/gpu_check.py [--only NAME ...] [--output FOLDER]
    python benchmarks/gpu_check.py --device cpu    # the same checks at small size, without a GPU

A NAME is a check, or a group of checks that finishes within ten minutes: `GPU.md` lists them.

Each check runs in its own process with a time limit. When a check ends, its figures are printed and appended to
FOLDER/figures.md with their expected ranges; `!` marks figures out of range. FOLDER/CHECK.txt has the output. The exit
code is 1 if a check failed or a figure is out of range.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from workload import ROOT, docstring_parser, start_script

from minirl.ranks import launch
from minirl.run.run_folder import runs_root

PACKAGES = ("torch", "transformers", "numpy", "tyro", "pytest", "triton", "flash-attn", "wandb")
GRPO, PPO = "train_grpo.py", "train_ppo.py"
NUM_STEPS = 3  # steps after which a run is stopped
SKIPPED = "skipped, needs a GPU"  # in place of a figure
FIGURES = "FIGURES "  # prefix of a check's output lines with figures
Figures = dict[str, Any]  # numbers are compared with ranges; other values are only shown


class Place(NamedTuple):
    """The running check's name, device and output folder."""

    name: str
    device: torch.device
    output: Path

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def log(self) -> Path:
        """File with the output of the check and its subprocesses."""
        return self.output / f"{self.name}.txt"


class Check(NamedTuple):
    """A check with its time limit in seconds.

    run: yields figures as it measures them. On the CPU, yields SKIPPED for figures that need a GPU.
    expected: ranges of figures as (lowest, highest); other figures are only shown.
    """

    limit_s: int
    run: Callable[[Place], Iterator[Figures]]
    expected: Mapping[str, tuple[float, float]] = {}


def environment(place: Place) -> Iterator[Figures]:
    """Report versions and the device, and check that the scripts can be imported."""
    for name in PACKAGES:
        yield {name: "missing"}
        with contextlib.suppress(PackageNotFoundError):
            yield {name: version(name)}
    if place.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        yield {
            "device": properties.name,
            "devices": torch.cuda.device_count(),
            "memory_gib": properties.total_memory / 2**30,
        }
    import train_ppo  # noqa: F401


def gpu_tests(place: Place) -> Iterator[Figures]:
    """Run `pytest -m gpu`, which skips its tests without a device."""
    # Drop the project's options, which need pytest-xdist.
    command = [sys.executable, "-m", "pytest", "-v", "-o", "addopts=", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "tests/test_gpu.py"], cwd=ROOT, check=False)
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", place.log.read_text())
    found = {kind: int(number) for number, kind in counts}
    yield {"passed": 0 if place.is_cuda else SKIPPED, **found, "exit_code": done.returncode}


def learns(place: Place, script: str, *flags: str) -> Iterator[Figures]:
    """Run a script as README does, and check that the reward rises and that sampling and training agree."""
    ranks = min(2, torch.cuda.device_count()) or 2
    metrics = run_script(place, script, "--num-steps", "100" if place.is_cuda else "2", *flags, ranks=ranks)
    rewards = [step["reward/mean"] for step in metrics]
    first, last = fmean(rewards[:10]), fmean(rewards[-10:])
    yield {"ranks": ranks, "first_reward": first, "last_reward": last}
    yield {"rise": last - first if place.is_cuda else SKIPPED, **figures_of(metrics)}


def real_size(place: Place, script: str) -> Iterator[Figures]:
    """Run three steps of a random 1.5B model at the automatic sizes; on the CPU, a tiny model.

    The run is killed before saving, because a checkpoint would take 21.6 GB. The entropy bonus gives a gradient
    whatever the rewards.
    """
    from cuda_decode import write_random_model

    from minirl.run.embedded_model import save_tokenizer

    model = runs_root() / "random"
    if not model.exists():
        write_random_model("qwen2.5-1.5b" if place.is_cuda else "tiny", model)
        save_tokenizer(model)
    rows = [json.dumps({"question": f"{number:0400d}", "answer": "#### 1"}) for number in range(256)]
    data = runs_root() / "digits.jsonl"
    data.write_text("\n".join(rows))
    most = 512 if place.is_cuda else 8
    flags = f"""--model {model} --task gsm8k --data {data} --max-new-tokens {most}
        --entropy-coef 0.001""".split()
    yield figures_of(run_script(place, script, *flags, stop=signal.SIGKILL))
    sizes, *budget = re.findall("^memory (.*)", place.log.read_text(), re.MULTILINE)
    yield {"sizes": sizes, "budget": budget}


def kill_and_resume(place: Place) -> Iterator[Figures]:
    """Check that SIGTERM stops a run with a checkpoint, and that the same command resumes it to the end."""
    flags = ("--num-steps", "12", "--save-every", "2")
    yield {"steps_before": len(run_script(place, GRPO, *flags, stop=signal.SIGTERM))}
    steps = [step["step"] for step in run_script(place, GRPO, *flags)]
    yield {"steps_in_order": steps == list(range(1, 13))}


def waits(place: Place) -> Iterator[Figures]:
    """Count how often the host waits for the device in a microbatch; tests/test_gpu.py covers decode steps."""
    from cuda_decode import random_model

    from minirl.training.batch import Batch, sequence_infos_from_lengths
    from minirl.training.scoring import score_batch

    model = random_model("tiny", place.device)
    tokens = torch.arange(96, device=place.device)
    batch = Batch(sequence_infos_from_lengths([64, 32]), tokens, loss_mask=tokens % 64 > 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if place.is_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        logprobs, _ = score_batch(model, batch)
        logprobs.sum().backward()
    yield {"of_microbatch": sum("synchroniz" in str(warning.message) for warning in caught)}


def compiled(place: Place) -> Iterator[Figures]:
    """Time functions without a custom kernel, forward and backward in ms, eagerly and with `torch.compile`."""
    from cuda_decode import timed

    from minirl.model.rotation import rotate

    rows, backend = (8192, "inductor") if place.is_cuda else (8, "eager")
    make = functools.partial(torch.randn, device=place.device, dtype=torch.bfloat16, requires_grad=True)
    rotation = torch.rand(2, rows, 1, 128, device=place.device)
    x, gate, up = make(rows, 28, 128), make(rows, 18944), make(rows, 18944)
    functions = {"rotation": lambda: rotate(x, rotation), "gate": lambda: F.silu(gate) * up}
    for name, function in functions.items():
        for how, run in (("eager", function), ("compiled", torch.compile(function, backend=backend))):
            seconds = timed(lambda: run().sum().backward(), place.device)  # noqa: B023
            yield {f"{name}_{how}_ms": 1e3 * seconds}


def speed(place: Place, shape: str, *requests: int, **options: Any) -> Iterator[Figures]:
    """Yield the figures of `cuda_decode.py`."""
    from cuda_decode import NEEDS_GPU, measure

    if place.is_cuda:
        yield from measure(shape, requests, **options)
        return
    yield dict.fromkeys(CHECKS[place.name].expected, SKIPPED)
    for figures in measure("tiny", [8], 32, **options):
        yield {name: SKIPPED if name.endswith(NEEDS_GPU) else value for name, value in figures.items()}


def kernels(place: Place, shape: str) -> Iterator[Figures]:
    """Measure only decode, and write a kernel table to a file."""
    return speed(place, shape, 128, kernels=place.log.with_suffix(".md"))


def sweep(place: Place) -> Iterator[Figures]:
    """Time the decode kernel in microseconds under each setting, for 128 requests of 1,024 tokens."""
    if not place.is_cuda:
        yield {"microseconds": SKIPPED}
        return
    from paged_resources import SETTINGS
    from triton.testing import do_bench_cudagraph

    from minirl.extras.kernels import paged_attention

    # Each request has 8 blocks of 128 tokens.
    blocks = torch.arange(1024, dtype=torch.int32, device=place.device).view(128, 8)
    lengths = torch.full((128,), 1024, dtype=torch.int32, device=place.device)
    make = functools.partial(torch.randn, device=place.device, dtype=torch.bfloat16)
    for num_heads, num_kv_heads in ((12, 2), (28, 4)):  # the 1.5B and 7B models
        keys = make(1024, num_kv_heads, 128, 128)
        inputs = (make(128, num_heads, 128), keys, keys.mT.contiguous(), blocks, lengths)
        decode = functools.partial(paged_attention.decode, *inputs, window=None)
        for num_programs, options in itertools.product((512, 1024), SETTINGS):
            paged_attention.MIN_PROGRAMS, paged_attention.OPTIONS = num_programs, options
            name = f"{num_heads} heads, {num_programs} programs, {options}"
            try:
                yield {name: 1e3 * do_bench_cudagraph(decode)}
            except Exception as error:  # the setting does not fit the device
                yield {name: repr(error)}


SMALL_GAP = {"gap_mean": (0.0, 0.05)}
LEARNS = SMALL_GAP | {"rise": (0.15, 1)}
THREE_STEPS = SMALL_GAP | {"steps": (3, 4)}  # a fourth step may end before the kill
SPEED = SMALL_GAP | {
    "graphs_128_of_roofline": (0.2, 1),
    "graphs_512_of_roofline": (0.2, 1),
    "update_mfu": (0.2, 1),
    "update_of_plan": (0.7, 1.1),
}
KILLED = {"steps_before": (3, 11), "steps_in_order": (1, 1)}
LORA = ("--lora-rank", "8", "--kl-coef", "0.001")  # the base model is the reference
# Most important first. The time limits in a group add up to less than ten minutes.
GROUPS = {
    "right": {
        "environment": Check(40, environment),
        "waits": Check(60, waits, {"of_microbatch": (0, 2)}),
        "gpu_tests": Check(240, gpu_tests, {"passed": (1, 999), "exit_code": (0, 0)}),
        "grpo": Check(200, lambda place: learns(place, GRPO), LEARNS),
    },
    "real": {
        "speed": Check(220, lambda place: speed(place, "qwen2.5-1.5b", 128, 512), SPEED),
        "grpo_1_5b": Check(240, lambda place: real_size(place, GRPO), THREE_STEPS),
        "kernels_1_5b": Check(100, lambda place: kernels(place, "qwen2.5-1.5b")),
    },
    "learning": {
        "ppo": Check(140, lambda place: learns(place, PPO), LEARNS),
        "adapters": Check(140, lambda place: learns(place, GRPO, *LORA), LEARNS),
        "offload": Check(140, lambda place: learns(place, GRPO, "--offload-optimizer"), LEARNS),
        "kill_and_resume": Check(120, kill_and_resume, KILLED),
    },
    "more": {
        "ppo_1_5b": Check(220, lambda place: real_size(place, PPO), THREE_STEPS),
        "kernels_7b": Check(150, lambda place: kernels(place, "qwen2.5-7b")),
        "sweep": Check(120, sweep),
        "compiled": Check(70, compiled),
    },
}
CHECKS = {name: check for group in GROUPS.values() for name, check in group.items()}


def run_script(
    place: Place, script: str, *flags: str, ranks: int = 1, stop: signal.Signals | None = None
) -> list[dict[str, float]]:
    """Run a training script, at small size without a GPU, and return its metrics.

    stop: signal to send after NUM_STEPS steps. Raises RuntimeError if the script fails without a signal.
    """
    flags += ("--run-name", place.name)
    if not place.is_cuda:
        flags += ("--prompts-per-step", "4")
    job = start_script(script, *flags, runs=runs_root(), ranks=ranks)
    metrics = runs_root() / place.name / "metrics.jsonl"
    while stop and job.poll() is None:
        time.sleep(0.05)
        if metrics.exists() and metrics.read_text().count("\n") >= NUM_STEPS:
            job.send_signal(stop)
            break
    if job.wait() and not stop:
        raise RuntimeError(f"exit code {job.returncode}")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def figures_of(metrics: list[dict[str, float]]) -> Figures:
    """Return the figures that every run reports."""
    return {
        "steps": len(metrics),
        "gap_mean": max(step["policy/logp_gap_mean"] for step in metrics),
        "step_s": fmean(step["time/step"] for step in metrics[1:]),
    }


def run_here(place: Place) -> None:
    """Run a check in this process and print its figures."""
    for figures in CHECKS[place.name].run(place):
        print(FIGURES + json.dumps(figures), flush=True)


def run_alone(place: Place) -> tuple[str, Figures]:
    """Run a check in its own process. Return "ok", "failed" or "too slow", and the printed figures."""
    command = [sys.executable, __file__, "--here", place.name, "--output", str(place.output)]
    began = time.monotonic()
    with place.log.open("w") as file:
        job = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    status = "too slow"
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = "failed" if job.wait(CHECKS[place.name].limit_s) else "ok"
    finally:  # even if this process is stopped
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    figures: Figures = {"seconds": time.monotonic() - began}
    for found in re.findall(rf"^{FIGURES}({{.*}})$", place.log.read_text(errors="replace"), re.MULTILINE):
        figures |= json.loads(found)
    return status, figures


def format_check(name: str, status: str, figures: Figures) -> tuple[str, bool]:
    """Format a check as rows of a Markdown table. Also return whether the check passed with all figures in range."""
    ranges = CHECKS[name].expected
    rows, is_good = [f"| **{name}** | {status} | | |"], status == "ok"
    for figure in {**figures, **ranges}:
        value, expected, mark = figures.get(figure, math.nan), "", ""
        if figure in ranges:
            low, high = ranges[figure]
            expected = f"{low:g} to {high:g}"
            if value != SKIPPED and not low <= value <= high:
                mark, is_good = " !", False
        shown = f"{value:.4g}" if isinstance(value, float) else value
        rows.append(f"| | {figure} | {shown}{mark} | {expected} |")
    return "\n".join(rows), is_good


def parse_args() -> argparse.Namespace:
    parser = docstring_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=[*GROUPS, *CHECKS], default=list(GROUPS), metavar="NAME")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu_check", metavar="FOLDER")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.here:
        launch.run(lambda: run_here(Place(args.here, device, args.output)))
    if device.type != args.device:
        print("no CUDA device is available; --device cpu runs the same checks at small size")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args.output.mkdir(parents=True, exist_ok=True)
    are_good = []
    with tempfile.TemporaryDirectory() as runs, (args.output / "figures.md").open("a", buffering=1) as file:
        os.environ["MINIRL_RUNS"] = runs
        print("| check | figure | value | expected |\n|---|---|---|---|", file=file)
        for name in itertools.chain.from_iterable(GROUPS.get(name, [name]) for name in args.only):
            place = Place(name, device, args.output)
            status, figures = run_alone(place)
            rows, is_good = format_check(name, status, figures)
            are_good.append(is_good)
            print(rows, file=file)
            print(rows, flush=True)
            if status != "ok":
                print(place.log.read_text(errors="replace")[-5000:], flush=True)
    return 0 if all(are_good) else 1


if __name__ == "__main__":
    sys.exit(main())
