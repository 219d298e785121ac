"""Check on a GPU, unattended and within ten minutes, that everything is right and how fast it is.

    python benchmarks/gpu_check.py [--write] [--only NAME ...] [--out FILE.json]
    python benchmarks/gpu_check.py --device cpu    # the same program, small, without a GPU

Each check runs in its own process with a time limit, so that one failure does not hide the others. The table shows the
expected range of every figure; `!` marks those that are outside. The exit code is 1 if a check failed or a figure is
outside. `--write` puts the table into benchmarks/GPU.md.
"""

import argparse
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from workload import ROOT, start_script

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "fla-core", "tyro", "wandb", "safetensors")
Figures = dict[str, float | str]


@dataclass(frozen=True)
class Check:
    """A check, the expected ranges of its figures as (lowest, highest), and its time limit in seconds.

    None leaves a side of a range open. Figures without an entry are only shown.
    """

    run: Callable[["Place"], Figures]
    limit_s: int
    expected: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)


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
    figures: Figures = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            figures[package] = version(package)
        except PackageNotFoundError:
            figures[package] = "none"
    if not place.is_cuda:
        return figures
    from minirl.model.attention import kernel_for
    from minirl.model.device_kernels import has_fla

    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    figures["device"] = properties.name
    figures["capability"] = f"{properties.major}.{properties.minor}"
    figures["memory_gib"] = properties.total_memory / 2**30
    figures["cuda"] = str(torch.version.cuda)
    figures["packed_kernel"] = kernel_for(device, torch.bfloat16)
    figures["delta_rule"] = "fla" if has_fla(device, torch.bfloat16) else "torch"
    return figures


def empty_microbatch(place: Place) -> Figures:
    """Forward and backward of a microbatch without rollouts, which a rank has when others have more work."""
    from minirl.training.batch import Batch
    from minirl.training.scoring import score_batch

    device = torch.device(place.device)
    model = tiny_model(device)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    logprobs, entropies = score_batch(model, Batch((), nothing, nothing.bool()))
    (logprobs.sum() + entropies.sum()).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return {
        "parameters_without_gradient": sum(1 for _ in model.parameters()) - len(gradients),
        "largest_gradient": max(float(gradient.abs().max()) for gradient in gradients),
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
    output, _ = run_to_end("train_grpo.py", "--num-steps", "3", "--run-name", "first", place=place, ranks=2)
    return {"steps": output.count("\nstep ")}


def learns(place: Place, script: str, *flags: str) -> Figures:
    """A script's default run on the device: the reward rises, and sampling and training agree."""
    num_steps = "100" if place.is_cuda else "2"
    _, metrics = run_to_end(script, *place.flags, "--num-steps", num_steps, *flags, place=place)
    num_averaged = min(10, len(metrics) // 2)
    rewards = [step["reward/mean"] for step in metrics]
    return {
        "first_reward": sum(rewards[:num_averaged]) / num_averaged,
        "last_reward": sum(rewards[-num_averaged:]) / num_averaged,
        "gap_mean": max(step["policy/logp_gap_mean"] for step in metrics),
        "gap_max": max(step["policy/logp_gap_max"] for step in metrics),
        "step_s": sum(step["time/step"] for step in metrics[1:]) / (len(metrics) - 1),
    }


def grpo(place: Place) -> Figures:
    """See `learns`."""
    return learns(place, "train_grpo.py")


def ppo(place: Place) -> Figures:
    """See `learns`."""
    return learns(place, "train_ppo.py")


def adapters(place: Place) -> Figures:
    """See `learns`: LoRA, with the policy's base as the reference."""
    flags = ("--lora-rank", "8", "--kl-coef", "0.001", "--run-name", "adapters")
    return learns(place, "train_grpo.py", *flags)


def real_size(place: Place, script: str) -> Figures:
    """Three steps of 1.5B random parameters at the automatic sizes, on a card of 80 GB; on the CPU a tiny model."""
    from cuda_decode import write_random_model

    from minirl.run.embedded_model import save_tokenizer

    model = place.folder / "random"
    if not model.exists():
        write_random_model("qwen2.5-1.5b" if place.is_cuda else "tiny", model)
        save_tokenizer(model)
    data = place.folder / "digits.jsonl"
    rows = [{"prompt": f"{random.Random(i).getrandbits(1300):0400d}"} for i in range(256)]
    data.write_text("\n".join(map(json.dumps, rows)))
    reward = place.folder / "reward.py"
    reward.write_text(
        "def score(completion_ids, **kwargs):\n    return [sum(ids) % 7 for ids in completion_ids]\n"
    )
    flags = [*place.flags, "--num-steps", "3", "--model", str(model), "--data", str(data)]
    flags += ["--reward", f"{reward}:score", "--run-name", f"random-{Path(script).stem}"]
    flags += ["--max-new-tokens", "512" if place.is_cuda else "8"]
    output, metrics = run_to_end(script, *flags, place=place)
    return {
        "sizes": output.partition("\nsizes ")[2].partition("\n")[0],
        "steps": len(metrics),
        "gap_mean": max(step["policy/logp_gap_mean"] for step in metrics),
        "step_s": metrics[-1]["time/step"],
    }


def grpo_1_5b(place: Place) -> Figures:
    """See `real_size`."""
    return real_size(place, "train_grpo.py")


def ppo_1_5b(place: Place) -> Figures:
    """See `real_size`."""
    return real_size(place, "train_ppo.py")


def kill_and_resume(place: Place) -> Figures:
    """SIGTERM stops a run with a checkpoint, and the same command goes on to the end."""
    flags = (*place.flags, "--num-steps", "12", "--save-every", "2", "--run-name", "killed")
    job = start_script("train_grpo.py", *flags, runs=place.folder, ranks=1)
    metrics = place.folder / "killed" / "metrics.jsonl"
    while job.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 3):
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    code = job.wait()
    num_before = metrics.read_text().count("\n")
    _, steps = run_to_end("train_grpo.py", *flags, place=place)
    in_order = [step["step"] for step in steps] == list(range(1, 13))
    return {"exit_code": code, "steps_before": num_before, "steps_in_order": int(in_order)}


def waits(place: Place) -> Figures:
    """How often the host waits for the device in a late decode step, and in a microbatch."""
    from minirl.generation.engine import Engine
    from minirl.rollouts import Request, RolloutId
    from minirl.training.batch import Batch
    from minirl.training.scoring import score_batch

    device = torch.device(place.device)
    model = tiny_model(device)
    engine = Engine(model, max_running_requests=8, cache_tokens=4096, dtype=torch.bfloat16, device=device)
    requests = []
    for i in range(8):
        requests.append(Request((1, 2, 3, i), RolloutId(i, 0), i, 64, 1.0, frozenset()))
    engine.submit(requests)
    for _ in range(3):
        engine.step()
    with counted_waits(place) as in_decode_steps:
        for _ in range(10):
            engine.step()

    tokens = torch.arange(96, device=device)
    batch = Batch((64, 32), tokens, loss_mask=tokens % 64 > 8)
    with counted_waits(place) as in_microbatch:
        logprobs, _ = score_batch(model, batch)
        logprobs.sum().backward()
    return {"of_decode_step": len(in_decode_steps) / 10, "of_microbatch": len(in_microbatch)}


def compiled(place: Place) -> Figures:
    """How many times as fast `torch.compile` makes what no kernel computes: with backward, but for the sampler."""
    from minirl.generation.sampling import sample
    from minirl.model.rotation import Rotation, rotate
    from minirl.training.scoring import outputs_of_head

    rows, hidden, vocab = (8192, 3584, 151936) if place.is_cuda else (8, 64, 512)
    dtype = torch.bfloat16 if place.is_cuda else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=place.device, dtype=dtype).requires_grad_()

    def random_ids(count: int) -> Tensor:
        return torch.arange(count, device=place.device)

    angles = torch.rand(rows, 1, 128, device=place.device)
    rotation = Rotation(angles.cos(), angles.sin())
    states, head = random(rows, hidden), random(vocab, hidden)
    few = min(rows, 256)
    noise = {"keys": random_ids(few), "positions": random_ids(few)}
    heat = torch.ones(few, device=place.device)
    cases: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]] = {
        "rotation": (lambda x: rotate(x, rotation), [random(rows, 28, 128)]),
        "gate": (lambda gate, up: F.silu(gate) * up, [random(rows, 4 * hidden), random(rows, 4 * hidden)]),
        "head": (
            lambda x, weight: outputs_of_head(x, weight, random_ids(rows), torch.ones_like(x[:, :1]))[0],
            [states, head],
        ),
        "sampler": (
            lambda x, weight: sample(x, weight, **noise, temperature=heat)[1],
            [states.detach()[:few], head.detach()],
        ),
    }
    figures: Figures = {}
    for name, (function, inputs) in cases.items():
        made = torch.compile(function, backend="inductor" if place.is_cuda else "eager")
        eager_s, compiled_s = (seconds_of(version, inputs, place) for version in (function, made))
        figures |= {f"{name}_ms": 1e3 * eager_s, f"{name}_speedup": eager_s / compiled_s}
    return figures


def seconds_of(function: Callable[..., Tensor], inputs: Sequence[Tensor], place: Place) -> float:
    """The least wall seconds of a call, and of backward if an input has a gradient, after one that does not count."""
    least = float("inf")
    for i in range(6):
        began = time.perf_counter()
        out = function(*inputs)
        if out.requires_grad:
            out.sum().backward()
        if place.is_cuda:
            torch.cuda.synchronize()
        if i:
            least = min(least, time.perf_counter() - began)
    return least


def speed(place: Place) -> Figures:
    """Decode against the memory's bandwidth, update and prefill against the arithmetic, memory and refresh."""
    shape = "qwen3-0.6b" if place.is_cuda else "tiny"
    sizes = ["--requests", "64", "256", "512"] if place.is_cuda else ["--requests", "8", "--steps", "4"]
    command = [sys.executable, str(ROOT / "benchmarks" / "cuda_decode.py"), shape, *sizes]
    if place.is_cuda:
        bandwidth, flops = limits_of(torch.cuda.get_device_name())
        command += ["--bandwidth", str(bandwidth), "--flops", str(flops)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-2000:])
    result = done.stdout.strip().splitlines()[-1].removeprefix("RESULT ")
    return dict(json.loads(result))


CHECKS = {
    "environment": Check(environment, 60),
    "empty_microbatch": Check(
        empty_microbatch, 90, {"parameters_without_gradient": (0, 0), "largest_gradient": (0, 0)}
    ),
    "gpu_tests": Check(gpu_tests, 240, {"failed": (0, 0)}),
    "first_command": Check(first_command, 120, {"steps": (3, 3)}),
    "grpo": Check(grpo, 240, {"last_reward": (0.9, None), "gap_mean": (0, 0.05)}),
    "ppo": Check(ppo, 240, {"last_reward": (0.9, None), "gap_mean": (0, 0.05)}),
    "adapters": Check(adapters, 240, {"last_reward": (0.6, None), "gap_mean": (0, 0.05)}),
    "grpo_1_5b": Check(grpo_1_5b, 400, {"steps": (3, 3), "gap_mean": (0, 0.05)}),
    "ppo_1_5b": Check(ppo_1_5b, 300, {"steps": (3, 3), "gap_mean": (0, 0.05)}),
    "kill_and_resume": Check(
        kill_and_resume, 120, {"exit_code": (143, 143), "steps_before": (3, 11), "steps_in_order": (1, 1)}
    ),
    "waits": Check(waits, 90, {"of_decode_step": (0, 1), "of_microbatch": (0, 2)}),
    "compiled": Check(compiled, 240),
    "speed": Check(
        speed,
        300,
        {
            "graphs_64_of_roofline": (0.17, 1),
            "graphs_256_of_roofline": (0.23, 1),
            "graphs_512_of_roofline": (0.25, 1),
            "update_mfu": (0.24, 1),
            "update_of_plan": (0.9, 1.1),
            "gap_mean": (0, 0.05),
        },
    ),
}
# Of these cards: bytes per second of the memory, and bf16 products per second without sparsity.
LIMITS = {
    "B200": (8.0e12, 2250e12),
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.0e12, 312e12),
    "L40": (0.86e12, 181e12),
    "4090": (1.0e12, 165e12),
}
# Without a device the few steps learn nothing, and there is no roofline.
NOT_ON_CPU = (
    "last_reward",
    "update_mfu",
    "update_of_plan",
    "graphs_64_of_roofline",
    "graphs_256_of_roofline",
    "graphs_512_of_roofline",
)


def limits_of(name: str) -> tuple[float, float]:
    """Bandwidth and arithmetic of a card; an H100's for an unknown card."""
    for card, limits in LIMITS.items():
        if card in name:
            return limits
    return LIMITS["H100"]


def tiny_model(device: torch.device) -> torch.nn.Module:
    """A random model of two layers in bf16."""
    from cuda_decode import COMMON, SHAPES

    from minirl.model.families import config_from_dict
    from minirl.model.transformer import Transformer

    torch.manual_seed(0)
    return Transformer(config_from_dict(COMMON | SHAPES["tiny"])).bfloat16().to(device)


@contextmanager
def counted_waits(place: Place) -> Iterator[list[warnings.WarningMessage]]:
    """The waits for the device within the block, as torch's warnings; none on the CPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if place.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
        yield caught
        if place.is_cuda:
            torch.cuda.set_sync_debug_mode("default")
        caught[:] = [warning for warning in caught if "synchroniz" in str(warning.message)]


def run_to_end(script: str, *flags: str, place: Place, ranks: int = 1) -> tuple[str, list[dict[str, float]]]:
    """Run a training script; returns its output and its metrics. Raises RuntimeError if it fails."""
    if "--run-name" not in flags:
        flags = ("--run-name", Path(script).stem, *flags)
    name = flags[flags.index("--run-name") + 1]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = start_script(script, *flags, runs=place.folder, ranks=ranks, **pipes)
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


def outside(name: str, figure: str, value: float | str, device: str) -> bool:
    """Return whether a figure is outside its expected range."""
    if isinstance(value, str) or (device == "cpu" and figure in NOT_ON_CPU):
        return False
    low, high = CHECKS[name].expected.get(figure, (None, None))
    return (low is not None and value < low) or (high is not None and value > high)


def is_good(outcome: Outcome, device: str) -> bool:
    """Return whether a check finished with all figures as expected."""
    missing = CHECKS[outcome.name].expected.keys() - outcome.figures.keys()
    if device == "cpu":
        missing -= set(NOT_ON_CPU)
    is_outside = any(outside(outcome.name, *figure, device) for figure in outcome.figures.items())
    return outcome.status == "ok" and not missing and not is_outside


def table_of(outcomes: Sequence[Outcome], device: str) -> str:
    """A Markdown table of all figures."""
    lines = ["| check | figure | value | expected |", "|---|---|---|---|"]
    for outcome in outcomes:
        lines.append(f"| **{outcome.name}** | {outcome.status} | {outcome.seconds:g} s | |")
        for figure, value in outcome.figures.items():
            low, high = CHECKS[outcome.name].expected.get(figure, (None, None))
            bounds = [
                f"at least {low:g}" if low is not None else "",
                f"at most {high:g}" if high is not None else "",
            ]
            expected = ", ".join(bound for bound in bounds if bound)
            mark = " !" if outside(outcome.name, figure, value, device) else ""
            shown = value if isinstance(value, str) else f"{value:.4g}"
            lines.append(f"| | {figure} | {shown}{mark} | {expected} |")
    return "\n".join(lines)


def write_table(outcomes: Sequence[Outcome], table: str) -> None:
    """Put the result into GPU.md."""
    figures = outcomes[0].figures
    title = f"# {figures.get('device', 'No device')}, torch {figures.get('torch')}\n\n"
    how = "    python benchmarks/gpu_check.py --write\n\n"
    (ROOT / "benchmarks" / "GPU.md").write_text(title + how + table + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="NAME")
    parser.add_argument("--out", type=Path, help="a file for all figures and errors, as JSON")
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
            if args.out is not None:  # after each check, so that nothing is lost if this program is ended
                args.out.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    table = table_of(outcomes, args.device)
    print(table)
    if args.write:
        write_table(outcomes, table)
    return 0 if all(is_good(outcome, args.device) for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
