"""What the benchmarks share: the prompts, the clocks and the RESULT line. Not a program.

The prompts are random characters, 12 to 120 of them, the same in every run. With a character-level tokenizer and random
weights over V tokens, the lengths of completions are about geometric with mean V: rows finish at all times.
"""

import json
import os
import random
import resource
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from minirl.data.tokenizer import Tokenizer
from minirl.generation.engine import Request
from minirl.generation.sampling import request_key
from minirl.model.transformer import Transformer
from minirl.rollouts import RolloutId

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # so that benchmarks can import the training scripts
PROMPT_LENGTHS = (12, 20, 31, 47, 64, 80, 96, 120)
LETTERS = string.digits + string.ascii_lowercase + " +-*/=().,:;?!'\""


def start_script(
    script: str, *flags: str, runs: Path | str, ranks: int = 2, **options: Any
) -> subprocess.Popen:
    """Start a training script of this checkout, under torchrun for several ranks; `options` are Popen's."""
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    environment = {**os.environ, "MINIRL_RUNS": str(runs), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *torchrun, str(ROOT / script), *flags], env=environment, **options
    )


def prompt_texts(count: int, *, seed: int = 0) -> list[str]:
    """The same texts in every run: `count` prompts of PROMPT_LENGTHS characters, in turn."""
    rng = random.Random(seed)
    lengths = [PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)] for i in range(count)]
    return ["".join(rng.choice(LETTERS) for _ in range(length)) for length in lengths]


def encode_prompts(tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """`prompt_texts` as token ids, without special tokens."""
    return [
        tuple(tokenizer.backend(text, add_special_tokens=False)["input_ids"]) for text in prompt_texts(count)
    ]


def make_requests(
    prompts: Sequence[tuple[int, ...]], *, first: int, samples: int, max_new: int, stop_ids: frozenset[int]
) -> list[Request]:
    """`samples` requests of each prompt at temperature 1; `first`, the first prompt's ordinal, chooses the noise."""
    requests = []
    for i, prompt in enumerate(prompts):
        for sample in range(samples):
            key = request_key(0, purpose="train", prompt_ordinal=first + i, sample=sample)
            requests.append(Request(prompt, RolloutId(first + i, sample), key, max_new, 1.0, stop_ids))
    return requests


class LayerRows:
    """Counts the rows that pass the first layer of a model: tokens, and padding if there is any."""

    def __init__(self, model: Transformer):
        self.total = 0
        model.model.layers[0].register_forward_pre_hook(self._count)

    def take(self) -> int:
        """Rows since the last call."""
        total, self.total = self.total, 0
        return total

    def _count(self, module: torch.nn.Module, args: tuple) -> None:
        self.total += len(args[0])


class PhaseClock:
    """Wall and CPU seconds of this process by phase, under `<phase>` and `<phase>_cpu`."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, dict[str, float]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the block to `name`."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for key, spent in ((name, time.perf_counter() - wall), (f"{name}_cpu", time.process_time() - cpu)):
            self.seconds[key] = self.seconds.get(key, 0.0) + spent

    def take(self) -> dict[str, float]:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each column."""
    return {key: median(row[key] for row in rows) for key in rows[0]}


def print_row(row: Mapping[str, float]) -> None:
    """One run for a human."""
    print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)


def print_result(**values: object) -> None:
    """The last line of a benchmark, for machines (`compare.py`)."""
    shown = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values.items()}
    print("RESULT " + json.dumps(shown | {"torch": torch.__version__}), flush=True)


def reset_peak_rss() -> None:
    """Have the kernel count this process's peak resident set from now on. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def status_mib(key: str) -> float:
    """A figure of /proc/self/status: VmRSS is resident memory now, VmHWM its peak since `reset_peak_rss`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


def peak_rss_mib() -> float:
    """Peak resident set of this process."""
    unit = 1024 if sys.platform == "linux" else 1024**2  # ru_maxrss is in KiB on Linux, in bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
