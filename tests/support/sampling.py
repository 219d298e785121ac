"""Rows to sample tokens from, with top-k and top-p truncation rules."""

import torch
from torch import Tensor

from minirl.generation.sampling import request_key, sample
from minirl.rollouts import Truncation

GRID = [Truncation(k, p) for k in (1, 5, 40, 256) for p in (0.3, 0.9, 1.0)]
# One rule per row of `sampling_rows`; the first row has no rule.
RULES = [Truncation(), *GRID[1:], *GRID]


def keys_of(count: int) -> Tensor:
    return torch.tensor([request_key(0, purpose="train", prompt_ordinal=i, sample=0) for i in range(count)])


def columns(truncations: list[Truncation]) -> tuple[Tensor, ...]:
    """Return the truncation arguments of `sampled`, one entry per row."""
    top_k, top_p = zip(*truncations, strict=True)
    return torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64)


def sampling_rows(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return 24 rows with mixed temperatures, four of them greedy."""
    generator = torch.Generator().manual_seed(2)
    return {
        "hidden": torch.randn(24, 64, generator=generator).to(dtype),
        "keys": keys_of(24),
        "positions": torch.randint(0, 1000, (24,), generator=generator),
        "temperature": torch.tensor([1.0, 0.7, 0.0, 1.3, 0.25, 1.0] * 4),
    }


def random_head(vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(vocab, 64, generator=torch.Generator().manual_seed(4)).div(4).to(dtype)


def sampled(hidden, head, *, keys, positions, temperature, truncation=(), **options):
    """Return the tokens and logprobs of `sample`."""
    tokens, bits = sample(hidden, head, positions, (keys, temperature, *truncation), **options)
    return tokens.long(), bits.view(torch.float32)


def sample_rows(
    rows: dict[str, Tensor], head: Tensor, rules: list[Truncation], chosen: Tensor, **options: int
) -> tuple[Tensor, Tensor]:
    """Sample the chosen rows; without `rules`, no request has a truncation rule."""
    part = {name: x[chosen] for name, x in rows.items()}
    truncation = columns([rules[i] for i in chosen]) if rules else ()
    return sampled(head=head, **part, truncation=truncation, **options)
