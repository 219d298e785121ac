"""Memory, time and error of tokens' logprobs from hidden states and the head: full logits compared with minirl.

    OMP_NUM_THREADS=1 python benchmarks/head_memory.py [--vocab 151936] [--dtype float32]

`full` makes all logits at once in the given dtype and widens them. `full_wide` widens the factors first, so that its
error is as small as minirl's. Each variant runs in its own process (Linux, CPU). `extra_mib` is the peak of the
first forward and backward above the inputs and the head's gradient. `cpu_s` is the median over the runs of both passes.
`error` is the greatest difference of a gradient from that in float64, at a small shape, relative to the greatest
gradient.
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
from workload import print_figures, print_result, reset_peak_rss, status_mib

from minirl.model.batch_invariance import at_least_fp32
from minirl.training.scoring import TOKEN_CHUNK, ChunkedLogprobs


def full(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Logits [T, V] in the inputs' dtype, then in fp32."""
    logits = (hidden @ head.t()).to(at_least_fp32(head.dtype))
    logprobs = torch.log_softmax(logits, -1)
    return logprobs.gather(1, targets[:, None])[:, 0]


def full_wide(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Logits [T, V] from factors in fp32."""
    wide = at_least_fp32(head.dtype)
    return full(hidden.to(wide), head.to(wide), targets)


def minirl(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The head as `minirl.training.scoring.score` runs it."""
    logprobs, _ = ChunkedLogprobs.apply(hidden, head, targets, torch.ones(len(targets), 1), TOKEN_CHUNK)
    return logprobs


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "full": full,
    "full_wide": full_wide,
    "minirl": minirl,
}


def make_gradients(
    variant: str,
    vocab: int,
    width: int,
    tokens: int,
    dtype: torch.dtype,
    *,
    wide: bool = False,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that runs forward and backward; it returns the gradients of hidden states and head.

    The inputs are fixed and rounded to `dtype`. wide: afterwards they are made fp64.
    """
    generator = torch.Generator().manual_seed(0)
    compute_dtype = torch.float64 if wide else dtype
    hidden = torch.randn(tokens, width, generator=generator)
    hidden = hidden.to(dtype).to(compute_dtype).requires_grad_()
    head = torch.randn(vocab, width, generator=generator).mul_(0.05)
    head = head.to(dtype).to(compute_dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    weights = torch.randn(tokens, generator=generator)

    def gradients() -> tuple[Tensor, Tensor]:
        logprobs = VARIANTS[variant](hidden, head, targets)
        loss = (logprobs * weights).sum()
        return torch.autograd.grad(loss, (hidden, head))

    return gradients


def gradient_error(variant: str, vocab: int, width: int, dtype: torch.dtype) -> float:
    """The greatest relative difference of a gradient from that of full logits in fp64, for 64 tokens."""
    vocab = min(vocab, 5000)
    gradients = make_gradients(variant, vocab, width, 64, dtype)()
    expected = make_gradients("full", vocab, width, 64, dtype, wide=True)()
    errors = []
    for got, exact in zip(gradients, expected, strict=True):
        greatest = exact.abs().max()
        difference = (got - exact).abs().max()
        errors.append((difference / greatest).item())
    return max(errors)


def measure(variant: str, args: argparse.Namespace) -> dict[str, float]:
    """The figures of one variant, in this process."""
    dtype = getattr(torch, args.dtype)
    width = args.hidden
    # Load the libraries with inputs too small to leave memory allocated.
    make_gradients(variant, 64, 64, 64, dtype)()
    gradients = make_gradients(variant, args.vocab, width, args.tokens, dtype)
    seconds = []
    peaks = []
    reset_peak_rss()
    before = status_mib("VmRSS")
    for _ in range(args.runs):
        start = time.process_time()
        _, grad_head = gradients()
        seconds.append(time.process_time() - start)
        peaks.append(status_mib("VmHWM"))
    head_mib = grad_head.nbytes / 2**20
    return {
        "extra_mib": peaks[0] - before - head_mib,
        "cpu_s": median(seconds),
        "error": gradient_error(variant, args.vocab, width, dtype),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help="only this one, in this process, as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    if args.variant:
        print(json.dumps(measure(args.variant, args)))
        return
    result = {}
    for variant in VARIANTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures = json.loads(done.stdout.splitlines()[-1])
        print(f"{variant:10}", end="")
        print_figures(figures)
        for name, value in figures.items():
            result[f"{variant}_{name}"] = value
    print_result(
        what="head_memory",
        vocab=args.vocab,
        hidden=args.hidden,
        tokens=args.tokens,
        dtype=args.dtype,
        runs=args.runs,
        **result,
    )


if __name__ == "__main__":
    main()
