"""What truncated sampling costs: the head and the sampler, and the head in training, with and without `--top-k 20`.

    python benchmarks/truncation.py

CPU seconds on one thread, medians of interleaved runs. The vocabulary and the width are those of Qwen2.5-0.5B.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from minirl.generation.sampling import sample
from minirl.training.scoring import outputs_of_head

VOCAB_SIZE, WIDTH = 151_936, 896
NUM_REQUESTS, NUM_TOKENS = 32, 512
TOP_K, TOP_P = 20, 0.95


def truncation(rows: int) -> tuple[Tensor, ...]:
    """The argument of `sample` for this many requests."""
    doubles = (torch.full((rows,), value, dtype=torch.float64) for value in (TOP_P, 0.0))
    return torch.full((rows,), TOP_K), *doubles


def sampled(hidden: Tensor, head: Tensor, *, is_truncated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A decode step after the model."""
    rows = torch.arange(len(hidden))
    rules = truncation(len(hidden)) if is_truncated else ()
    return sample(
        hidden, head, keys=rows, positions=rows, temperature=torch.ones(len(hidden)), truncation=rules
    )


def ratio(name: str, plain: Callable[[], object], truncated: Callable[[], object], *, repeats: int) -> None:
    """Print the medians of both and their ratio."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for run, taken in zip((plain, truncated), seconds, strict=True):
            start = time.process_time()
            run()
            taken.append(time.process_time() - start)
    whole, among = map(statistics.median, seconds)
    print(f"{name}: {whole:.3f} s, truncated {among:.3f} s, ratio {among / whole:.2f}")


def main() -> None:
    """Measure both."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(VOCAB_SIZE, WIDTH, generator=generator) / 20
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator)
    few = hidden[:NUM_REQUESTS]
    ratio(
        f"sampling, {NUM_REQUESTS} requests",
        lambda: sampled(few, head, is_truncated=False),
        lambda: sampled(few, head, is_truncated=True),
        repeats=9,
    )
    tokens, _, kept = sampled(hidden, head, is_truncated=True)
    kept_ids = kept[:, :TOP_K].long()
    hidden.requires_grad_()
    head.requires_grad_()

    def train(ids: Tensor | None) -> None:
        logprobs, _ = outputs_of_head(hidden, head, tokens, torch.ones(len(tokens), 1), ids)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    ratio(f"training's head, {NUM_TOKENS} tokens", lambda: train(None), lambda: train(kept_ids), repeats=5)


if __name__ == "__main__":
    main()
