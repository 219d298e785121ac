"""Memory, time and error of the logprobs of tokens from hidden states and the head: full logits against minirl.

    OMP_NUM_THREADS=1 python benchmarks/head_memory.py [--vocab 151936] [--dtype float32]

`full` makes all logits at once in the given dtype and widens them; `full_wide` widens the factors first, so that it
errs as little as minirl. Each runs in a process of its own (Linux, CPU). `extra_mib` is the peak of the first forward
and backward above the inputs and the head's gradient, `cpu_s` the median of both over the runs, `error` the greatest
difference of a gradient from float64's at a small shape, relative to the greatest gradient.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from workload import print_result, print_row, reset_peak_rss, status_mib

from minirl.model.batch_invariance import at_least_fp32
from minirl.training.scoring import CHUNK, ChunkedLogprobs


def full(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Logits [T, V] in the inputs' dtype, then in fp32."""
    logits = (hidden @ head.t()).to(at_least_fp32(head.dtype))
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def full_wide(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Logits [T, V] from factors in fp32."""
    wide = at_least_fp32(head.dtype)
    return full(hidden.to(wide), head.to(wide), targets)


def minirl(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The head as `minirl.training.scoring.score` runs it."""
    return ChunkedLogprobs.apply(hidden, head, targets, 1.0, CHUNK)[0]


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "full": full,
    "full_wide": full_wide,
    "minirl": minirl,
}


def gradients(
    variant: str, vocab: int, width: int, tokens: int, dtype: torch.dtype, *, wide: bool
) -> Callable:
    """A function that runs forward and backward over fixed inputs rounded to `dtype`; `wide`: and then made fp64."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(tokens, width, generator=generator),
        torch.randn(vocab, width, generator=generator).mul_(0.05),
    ]
    for i in range(2):
        inputs[i] = inputs[i].to(dtype).to(torch.float64 if wide else dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    weights = torch.randn(tokens, generator=generator)
    return lambda: torch.autograd.grad((VARIANTS[variant](*inputs, targets) * weights).sum(), inputs)


def measure(variant: str, args: argparse.Namespace) -> dict[str, float]:
    """The figures of one variant, in this process."""
    dtype, seconds, peaks = getattr(torch, args.dtype), [], []
    gradients(
        variant, 64, 64, 64, dtype, wide=False
    )()  # loads the libraries, and is too small to leave memory behind
    run = gradients(variant, args.vocab, args.hidden, args.tokens, dtype, wide=False)
    reset_peak_rss()
    before = status_mib("VmRSS")
    for _ in range(args.runs):
        start = time.process_time()
        _, grad_head = run()
        seconds.append(time.process_time() - start)
        peaks.append(status_mib("VmHWM"))
    extra = peaks[0] - before - grad_head.nbytes / 2**20
    small = (min(args.vocab, 5000), args.hidden, 64, dtype)
    got, expected = gradients(variant, *small, wide=False)(), gradients("full", *small, wide=True)()
    error = max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(got, expected, strict=True))
    return {"extra_mib": extra, "cpu_s": median(seconds), "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help="only this one, in this process, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.variant:
        print(json.dumps(measure(args.variant, args)))
        return
    rows = {}
    for variant in VARIANTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows[variant] = json.loads(done.stdout.splitlines()[-1])
        print(f"{variant:10}", end="")
        print_row(rows[variant])
    shape = {name: getattr(args, name) for name in ("vocab", "hidden", "tokens", "dtype", "runs")}
    figures = {f"{variant}_{name}": value for variant, row in rows.items() for name, value in row.items()}
    print_result(what="head_memory", **shape, **figures)


if __name__ == "__main__":
    main()
