"""Check on a GPU, unattended and within ten minutes, that everything is right and how fast it is.

    python benchmarks/gpu_check.py [--write] [--only NAME ...]
    python benchmarks/gpu_check.py --device cpu    # the same program, small, without a GPU

Each check runs in its own process with a time limit, so that one failure does not hide the others. The table shows the
expected range of every figure; `!` marks those that are outside. The exit code is 1 if a check failed or a figure is
outside. `--write` puts the table into benchmarks/GPU.md.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor
from workload import ROOT, start_script

PACKAGES = ("torch", "transformers", "triton", "flash-attn")
Figures = dict[str, float | str]


@dataclass(frozen=True)
class Place:
    """Where checks run: the kind of device, and a folder for runs."""

    device: str
    folder: Path

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of a run there; without a device its steps are small."""
        return () if self.is_cuda else ("--prompts-per-step", "4")


@dataclass(frozen=True)
class Check:
    """A check, and its time limit in seconds.

    expected: the ranges of figures as (lowest, highest). on_cuda: those that only a device reaches. Other figures are
    only shown.
    """

    run: Callable[[Place], Figures]
    limit_s: int
    expected: dict[str, tuple[float, float]] = field(default_factory=dict)
    on_cuda: dict[str, tuple[float, float]] = field(default_factory=dict)

    def ranges(self, device: str) -> dict[str, tuple[float, float]]:
        """The ranges that hold on this kind of device."""
        return self.expected | (self.on_cuda if device == "cuda" else {})


@dataclass
class Outcome:
    """The result of a check."""

    name: str
    status: str  # "ok", "failed" or "too slow"
    seconds: float
    figures: Figures
    error: str = ""


def environment(place: Place) -> Figures:
    """Versions, the device, and the attention kernels that this machine gets."""
    installed = {package.metadata["Name"].lower(): package.version for package in distributions()}
    figures: Figures = {package: installed.get(package, "none") for package in PACKAGES}
    if not place.is_cuda:
        return figures
    from minirl.model.attention import kernel_for

    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    return figures | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": properties.total_memory / 2**30,
        "cuda": str(torch.version.cuda),
        "packed_kernel": kernel_for(device, torch.bfloat16),
    }


def gpu_tests(place: Place) -> Figures:
    """`pytest -m gpu`; they are skipped without a device."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/test_gpu.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped)", done.stdout)}
    if done.returncode != 0:
        print(done.stdout[-3000:])
    return {"passed": counts.get("passed", 0), "failed": counts.get("failed", 0)}


def first_command(place: Place) -> Figures:
    """README's first command, two ranks, whatever devices there are."""
    output, _ = run_to_end(place, "train_grpo.py", "first", "--num-steps", "3", ranks=2)
    return {"steps": output.count("\nstep ")}


def learns(place: Place, script: str, name: str, *flags: str) -> Figures:
    """A script's default run on the device: the reward rises, and sampling and training agree."""
    num_steps = "100" if place.is_cuda else "2"
    _, metrics = run_to_end(place, script, name, *place.flags, "--num-steps", num_steps, *flags)
    num_averaged = min(10, len(metrics) // 2)
    rewards = [step["reward/mean"] for step in metrics]
    return {
        "first_reward": fmean(rewards[:num_averaged]),
        "last_reward": fmean(rewards[-num_averaged:]),
        "gap_mean": max(step["policy/logp_gap_mean"] for step in metrics),
        "step_s": fmean(step["time/step"] for step in metrics[1:]),
    }


def real_size(place: Place, script: str) -> Figures:
    """Three steps of 1.5B random parameters at the automatic sizes, on a card of 80 GB; on the CPU a tiny model."""
    from cuda_decode import write_random_model

    from minirl.run.embedded_model import save_tokenizer

    model = place.folder / "random"
    if not model.exists():
        write_random_model("qwen2.5-1.5b" if place.is_cuda else "tiny", model)
        save_tokenizer(model)
    rows = [json.dumps({"prompt": f"{number:0400d}"}) for number in range(256)]
    (place.folder / "digits.jsonl").write_text("\n".join(rows))
    reward = place.folder / "reward.py"
    reward.write_text("def score(completion_ids):\n    return [sum(ids) % 7 for ids in completion_ids]\n")
    most = 512 if place.is_cuda else 8
    flags = f"""--num-steps 3 --model {model} --data {place.folder}/digits.jsonl --reward {reward}:score
        --max-new-tokens {most}""".split()
    output, metrics = run_to_end(place, script, f"random-{Path(script).stem}", *place.flags, *flags)
    return {
        "sizes": output.partition("\nsizes ")[2].partition("\n")[0],
        "steps": len(metrics),
        "gap_mean": max(step["policy/logp_gap_mean"] for step in metrics),
        "step_s": metrics[-1]["time/step"],
    }


def kill_and_resume(place: Place) -> Figures:
    """SIGTERM stops a run with a checkpoint, and the same command goes on to the end."""
    flags = (*place.flags, "--num-steps", "12", "--save-every", "2")
    job = start_script("train_grpo.py", *flags, "--run-name", "killed", runs=place.folder, ranks=1)
    metrics = place.folder / "killed" / "metrics.jsonl"
    while job.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 3):
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    code = job.wait()
    num_before = metrics.read_text().count("\n")
    _, steps = run_to_end(place, "train_grpo.py", "killed", *flags)
    in_order = [step["step"] for step in steps] == list(range(1, 13))
    return {"exit_code": code, "steps_before": num_before, "steps_in_order": int(in_order)}


def waits(place: Place) -> Figures:
    """How often the host waits for the device in a microbatch; of a decode step tests/test_gpu.py says it."""
    from minirl.training.batch import Batch
    from minirl.training.scoring import score_batch

    device = torch.device(place.device)
    model = tiny_model(device)
    tokens = torch.arange(96, device=device)
    batch = Batch((64, 32), tokens, loss_mask=tokens % 64 > 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if place.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
        logprobs, _ = score_batch(model, batch)
        logprobs.sum().backward()
        if place.is_cuda:
            torch.cuda.set_sync_debug_mode("default")
    return {"of_microbatch": sum("synchroniz" in str(warning.message) for warning in caught)}


def compiled(place: Place) -> Figures:
    """How many times as fast `torch.compile` makes what no kernel computes, with backward."""
    from cuda_decode import timed

    from minirl.model.rotation import rotate
    from minirl.training.scoring import outputs_of_head

    rows, hidden, vocab = (8192, 3584, 151936) if place.is_cuda else (8, 64, 512)
    device = torch.device(place.device)
    angles = torch.rand(rows, 1, 128, device=device)
    rotation = torch.stack([angles.cos(), angles.sin()])
    targets, heat = torch.arange(rows, device=device), torch.ones(rows, 1, device=device)
    cases: dict[str, tuple[Callable[..., Tensor], Sequence[tuple[int, ...]]]] = {
        "rotation": (lambda x: rotate(x, rotation), [(rows, 28, 128)]),
        "gate": (lambda gate, up: F.silu(gate) * up, [(rows, 4 * hidden)] * 2),
        "head": (lambda x, w: outputs_of_head(x, w, targets, heat)[0], [(rows, hidden), (vocab, hidden)]),
    }
    dtype, backend = (torch.bfloat16, "inductor") if place.is_cuda else (torch.float32, "eager")

    def seconds_of(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> float:
        return timed(lambda: function(*inputs).sum().backward(), device)

    figures: Figures = {}
    for name, (function, shapes) in cases.items():
        inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
        eager_s = seconds_of(function, inputs)
        speedup = eager_s / seconds_of(torch.compile(function, backend=backend), inputs)
        figures |= {f"{name}_ms": 1e3 * eager_s, f"{name}_speedup": speedup}
    return figures


def speed(place: Place) -> Figures:
    """Decode against the memory's bandwidth, update and prefill against the arithmetic, memory and refresh."""
    work = "qwen3-0.6b --requests 64 256 512" if place.is_cuda else "tiny --requests 8 --steps 4"
    command = [sys.executable, str(ROOT / "benchmarks" / "cuda_decode.py"), *work.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-2000:])
    result = done.stdout.strip().splitlines()[-1].removeprefix("RESULT ")
    return dict(json.loads(result))


SMALL_GAP = {"gap_mean": (0, 0.05)}
LORA = ("--lora-rank", "8", "--kl-coef", "0.001")  # its reference is the base
CHECKS = {
    "environment": Check(environment, 60),
    "gpu_tests": Check(gpu_tests, 240, {"failed": (0, 0)}),
    "first_command": Check(first_command, 120, {"steps": (3, 3)}),
    "grpo": Check(
        lambda place: learns(place, "train_grpo.py", "grpo"), 240, SMALL_GAP, {"last_reward": (0.9, 1)}
    ),
    "ppo": Check(
        lambda place: learns(place, "train_ppo.py", "ppo"), 240, SMALL_GAP, {"last_reward": (0.9, 1)}
    ),
    "adapters": Check(
        lambda place: learns(place, "train_grpo.py", "adapters", *LORA),
        240,
        SMALL_GAP,
        {"last_reward": (0.6, 1)},
    ),
    "grpo_1_5b": Check(lambda place: real_size(place, "train_grpo.py"), 400, SMALL_GAP | {"steps": (3, 3)}),
    "ppo_1_5b": Check(lambda place: real_size(place, "train_ppo.py"), 300, SMALL_GAP | {"steps": (3, 3)}),
    "kill_and_resume": Check(
        kill_and_resume, 120, {"exit_code": (143, 143), "steps_before": (3, 11), "steps_in_order": (1, 1)}
    ),
    "waits": Check(waits, 90, {"of_microbatch": (0, 2)}),
    "compiled": Check(compiled, 240),
    "speed": Check(
        speed,
        300,
        SMALL_GAP,
        {
            "graphs_64_of_roofline": (0.17, 1),
            "graphs_256_of_roofline": (0.23, 1),
            "graphs_512_of_roofline": (0.25, 1),
            "update_mfu": (0.24, 1),
            "update_of_plan": (0.9, 1.1),
        },
    ),
}


def tiny_model(device: torch.device) -> torch.nn.Module:
    """A random model of two layers in bf16."""
    from cuda_decode import COMMON, SHAPES

    from minirl.model.families import config_from_dict
    from minirl.model.transformer import Transformer

    torch.manual_seed(0)
    return Transformer(config_from_dict(COMMON | SHAPES["tiny"])).bfloat16().to(device)


def run_to_end(
    place: Place, script: str, name: str, *flags: str, ranks: int = 1
) -> tuple[str, list[dict[str, float]]]:
    """Run a training script; returns its output and its metrics. Raises RuntimeError if it fails."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = start_script(script, *flags, "--run-name", name, runs=place.folder, ranks=ranks, **pipes)
    output, _ = job.communicate()
    if job.returncode != 0:
        raise RuntimeError(output[-3000:])
    lines = (place.folder / name / "metrics.jsonl").read_text().splitlines()
    return output, [json.loads(line) for line in lines]


def run_alone(name: str, device: str, folder: Path) -> Outcome:
    """Run a check in its own process. Its runs go into the folder, where they share the embedded model."""
    check = CHECKS[name]
    began = time.monotonic()
    command = [sys.executable, __file__, "--here", name, "--device", device, "--folder", str(folder)]
    hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | hidden,
    )
    try:
        output, _ = job.communicate(timeout=check.limit_s)
        status = "ok" if job.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        status = "too slow"
    seconds = time.monotonic() - began
    figures: Figures = {}
    if status == "ok":
        *_, last_line = output.strip().splitlines()
        figures = json.loads(last_line)
    return Outcome(name, status, round(seconds, 1), figures, "" if status == "ok" else output[-3000:])


def misses(outcome: Outcome, device: str) -> list[str]:
    """The figures that are outside their ranges or not there."""
    ranges = CHECKS[outcome.name].ranges(device)
    figures = outcome.figures
    return [
        name
        for name, (low, high) in ranges.items()
        if name not in figures or not low <= figures[name] <= high
    ]


def is_good(outcome: Outcome, device: str) -> bool:
    """Return whether a check finished with all figures as expected."""
    return outcome.status == "ok" and not misses(outcome, device)


def table_of(outcomes: Sequence[Outcome], device: str) -> str:
    """A Markdown table of all figures."""
    lines = ["| check | figure | value | expected |", "|---|---|---|---|"]
    for outcome in outcomes:
        lines.append(f"| **{outcome.name}** | {outcome.status} | {outcome.seconds:g} s | |")
        ranges = CHECKS[outcome.name].ranges(device)
        for name, value in outcome.figures.items():
            shown = value if isinstance(value, str) else f"{value:.4g}"
            mark = " !" if name in misses(outcome, device) else ""
            expected = "{:g} to {:g}".format(*ranges[name]) if name in ranges else ""
            lines.append(f"| | {name} | {shown}{mark} | {expected} |")
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write benchmarks/GPU.md")
    parser.add_argument("--here", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu runs the same checks, small")
        return 2
    if args.here:
        print(json.dumps(CHECKS[args.here].run(Place(args.device, args.folder))))
        return 0
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            outcome = run_alone(name, args.device, Path(folder))
            outcomes.append(outcome)
            print(f"{name}: {outcome.status}, {outcome.seconds:g} s", flush=True)
            if outcome.error:
                print(outcome.error, flush=True)
    table = table_of(outcomes, args.device)
    print(table)
    if args.write:
        figures = outcomes[0].figures
        title = f"# {figures.get('device', 'No device')}, torch {figures.get('torch')}"
        how = "    python benchmarks/gpu_check.py --write"
        (ROOT / "benchmarks" / "GPU.md").write_text(f"{title}\n\n{how}\n\n{table}\n")
    return 0 if all(is_good(outcome, args.device) for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
