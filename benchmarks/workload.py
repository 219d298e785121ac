"""Shared benchmark code: prompts, clocks and the RESULT line. This file is not a program.

The prompts are 12 to 120 random characters, the same in every run. With a character-level tokenizer and random weights
over a vocabulary of size V, completion lengths are about geometric with mean V, so requests keep ending at different
times.
"""

import argparse
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
from minirl.generation.engine import Engine
from minirl.generation.sampling import request_key
from minirl.model.transformer import Transformer
from minirl.rollouts import Request, RolloutId

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # so that benchmarks can import the training scripts
PROMPT_LENGTHS = (12, 20, 31, 47, 64, 80, 96, 120)
LETTERS = string.digits + string.ascii_lowercase + " +-*/=().,:;?!'\""


def start_script(
    script: str, *flags: str, runs: Path | str, ranks: int = 2, **options: Any
) -> subprocess.Popen:
    """Start a training script of this checkout, under torchrun for several ranks.

    runs: parent folder of the run's folder. options: for `subprocess.Popen`.
    """
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(ROOT / script), *flags]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {"MINIRL_RUNS": str(runs), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.Popen(command, env=os.environ | variables, **options)


def prompt_texts(count: int, *, seed: int = 0) -> list[str]:
    """Return `count` texts, the same in every run. Their lengths in characters cycle through PROMPT_LENGTHS."""
    rng = random.Random(seed)
    texts = []
    for i in range(count):
        length = PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)]
        texts.append("".join(rng.choice(LETTERS) for _ in range(length)))
    return texts


def docstring_parser(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser whose help shows a docstring verbatim."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of the workload and the engine."""
    parser = docstring_parser(doc)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="compute dtype (default: float32)"
    )
    parser.add_argument("--prompts", type=int, default=8, help="prompts over all ranks (default: 8)")
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt (default: 8)")
    parser.add_argument(
        "--max-new", type=int, default=256, help="maximum tokens per completion (default: 256)"
    )
    parser.add_argument(
        "--max-running-requests", type=int, default=64, help="requests that a rank decodes at a time"
    )
    parser.add_argument(
        "--cache-tokens", type=int, default=24576, help="tokens in the KV cache (default: 64 x 3 x 128)"
    )
    return parser


def make_engine(args: argparse.Namespace, model: Transformer, device: torch.device) -> Engine:
    """Make an engine with the options of `make_parser`."""
    return Engine(
        model,
        max_running_requests=args.max_running_requests,
        cache_tokens=args.cache_tokens,
        dtype=getattr(torch, args.dtype),
        device=device,
    )


def encode_prompts(tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """Return `prompt_texts` as token ids, without special tokens."""
    encoded = [tokenizer.backend(text, add_special_tokens=False) for text in prompt_texts(count)]
    return [tuple(tokens["input_ids"]) for tokens in encoded]


def make_requests(
    prompts: Sequence[tuple[int, ...]], *, first: int, samples: int, max_new: int, stop_ids: frozenset[int]
) -> list[Request]:
    """Make `samples` requests per prompt (token ids) at temperature 1.

    first: the ordinal of the first prompt, which determines the sampling noise.
    """
    requests = []
    for prompt_ordinal, prompt_ids in enumerate(prompts, start=first):
        for sample in range(samples):
            key = request_key(0, purpose="train", prompt_ordinal=prompt_ordinal, sample=sample)
            rollout_id = RolloutId(prompt_ordinal, sample)
            requests.append(Request(prompt_ids, rollout_id, key, max_new, 1.0, stop_ids))
    return requests


class ComputedTokens:
    """Counts the tokens that pass through the first layer of a model, padding included."""

    def __init__(self, model: Transformer):
        self.total = 0
        model.model.layers[0].register_forward_pre_hook(self._count)

    def take(self) -> int:
        """Return the number of tokens since the last call."""
        total = self.total
        self.total = 0
        return total

    def _count(self, module: torch.nn.Module, args: tuple) -> None:
        self.total += len(args[0])


class PhaseClock:
    """Measures wall and CPU seconds of this process per phase, named `<phase>` and `<phase>_cpu`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to phase `name`."""
        wall = time.perf_counter()
        cpu = time.process_time()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._add(name, time.perf_counter() - wall)
        self._add(f"{name}_cpu", time.process_time() - cpu)

    def take(self) -> dict[str, float]:
        """Return the seconds per phase since the last call."""
        seconds = self.seconds
        self.seconds = {}
        return seconds

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each figure's median over the runs."""
    return {name: median(figures[name] for figures in runs) for name in runs[0]}


def print_figures(figures: Mapping[str, float]) -> None:
    """Print a run's figures on one line, for humans."""
    print("  ".join(f"{name} {value:.4g}" for name, value in figures.items()), flush=True)


def print_result(**values: object) -> None:
    """Print the RESULT line, the last line of a benchmark, for programs (`compare.py`)."""
    rounded: dict[str, object] = {}
    for name, value in values.items():
        rounded[name] = float(f"{value:.6g}") if isinstance(value, float) else value
    rounded["torch"] = torch.__version__
    print("RESULT " + json.dumps(rounded), flush=True)


def peak_rss_mib() -> float:
    """Return this process's peak resident memory in MiB since its start."""
    unit = 1024 if sys.platform == "linux" else 1024**2  # ru_maxrss is in KiB on Linux, in bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
