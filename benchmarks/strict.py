"""The cost of equal bits in sampled and training logprobs: minirl against itself without them. On the CPU.

    OMP_NUM_THREADS=1 python benchmarks/strict.py MODEL [--dtype bfloat16]

"free" is the same engine, scoring and update, but attention is torch's `scaled_dot_product_attention` (sequence by
sequence in packed streams, shared prompts repeated; in decoding over each request's keys, gathered and padded) and
matrix products are plain `F.linear`. They are patched in here and nowhere else. The two modes take turns; within a
round both answer the same requests under the same weights (the learning rate is 0). Reported are CPU seconds per
sampled token and per trained token, the ratios strict / free round by round, and the gap of the logprobs, which shows
that strict is exact and that free is not.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from unittest.mock import patch

import torch
import torch.nn.functional as F
from grpo_step import GrpoLoop, make_parser
from torch import Tensor
from workload import PhaseClock, print_figures, print_result

import minirl.model.transformer
from minirl.model import batch_invariance, padding
from minirl.model.attention import DecodeLayout, Layout, PackedLayout
from minirl.ranks import process_group


def cached_keys(layout: DecodeLayout, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [B, K, S, C] of each request, padded to the longest, and the position of its first key [B]."""
    pool, index = layout.pool_of_layer[layer]
    cached = layout.caches[pool]
    assert cached.read is not None, "a layout to decode from"
    table = cached.read.blocks.long()  # [B, n], the requests' blocks in order

    def gather(blocks: Tensor) -> Tensor:
        """The tables' blocks of a pool [blocks, K, BLOCK, C], with a request's blocks end to end."""
        gathered = blocks.index_select(0, table.flatten())
        gathered = gathered.unflatten(0, table.shape)  # [B, n, K, BLOCK, C]
        return gathered.transpose(1, 2).flatten(2, 3)

    # The portable pool stores keys transposed.
    keys = gather(cached.pool.keys[index].transpose(-1, -2))
    values = gather(cached.pool.values[index])
    first = layout.positions + 1 - cached.read.lengths
    return keys, values, first


def decode_attend(q: Tensor, layout: DecodeLayout, layer: int) -> Tensor:
    """Attention of one query per request [B, heads, C] over the request's cached keys."""
    keys, values, first = cached_keys(layout, layer)
    key_positions = first[:, None] + torch.arange(keys.shape[2])
    is_seen = key_positions <= layout.positions[:, None]
    # [B, K, heads per key head, C]: the heads that share a key head are that head's queries.
    groups = q.unflatten(1, (keys.shape[1], -1))
    mask = is_seen[:, None, None]
    out = F.scaled_dot_product_attention(groups, keys, values, attn_mask=mask)
    return out.flatten(1, 2)


def packed_attend(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    """Causal attention of a packed stream, one sequence at a time."""
    parts = []
    for x in (q, k, v):
        # Repeat shared prompts, so that each sequence is whole.
        whole = x[layout.hidden_index]
        whole = whole.transpose(0, 1)[None]  # [1, heads, T, C]
        parts.append(whole.split(list(layout.lengths), 2))
    outputs = []
    for sequence in zip(*parts, strict=True):
        out = F.scaled_dot_product_attention(*sequence, is_causal=True, enable_gqa=True)
        outputs.append(out)
    stream = torch.cat(outputs, 2)[0].transpose(0, 1)
    return stream[layout.computed_tokens]


def free_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    layer: int,
    window: int | None,
) -> Tensor:
    """`minirl.model.attention.attend` by `scaled_dot_product_attention`."""
    assert window is None, "this benchmark is for models without a window"
    if layout.caches:
        pool, index = layout.pool_of_layer[layer]
        layout.caches[pool].store(index, k, v)
    if isinstance(layout, DecodeLayout):
        return decode_attend(q, layout, layer)
    return packed_attend(q, k, v, layout)


@contextmanager
def free() -> Iterator[None]:
    """Inside the block, results are not batch-invariant."""

    def no_padding(x: Tensor, multiple: int = 1) -> Tensor:
        return x

    with (
        patch.object(minirl.model.transformer, "attend", free_attend),
        patch.object(padding, "pad_rows", no_padding),
        patch.object(batch_invariance, "pad_rows", no_padding),
        patch.object(batch_invariance, "linear", F.linear),
    ):
        yield


def run(loop: GrpoLoop, number: int) -> dict[str, float]:
    """One step; CPU microseconds per token of both phases, and the gap of the logprobs."""
    clock = PhaseClock(loop.device)
    with clock.phase("generate"):
        rollouts = loop.generate(number)
    batch, microbatches = loop.score(rollouts, loop.reward(rollouts))
    with clock.phase("update"):
        loop.backward(batch, microbatches)
        metrics = loop.step()
    num_sampled = int(batch.loss_mask.sum())
    num_trained = len(batch.tokens)
    return {
        "generate_us": 1e6 * clock.seconds["generate_cpu"] / num_sampled,
        "update_us": 1e6 * clock.seconds["update_cpu"] / num_trained,
        "equal_frac": metrics["policy/logp_equal_frac"],
        "gap_max": metrics["policy/logp_gap_max"],
    }


def summarize(strict_runs: list[dict[str, float]], free_runs: list[dict[str, float]]) -> dict[str, float]:
    """Medians of both modes, and the ratios strict / free of the rounds. The lists are by round."""
    result: dict[str, float] = {}
    for phase in ("generate", "update"):
        name = f"{phase}_us"
        strict_us = [figures[name] for figures in strict_runs]
        free_us = [figures[name] for figures in free_runs]
        ratios = [a / b for a, b in zip(strict_us, free_us, strict=True)]
        result[f"strict_{name}"] = median(strict_us)
        result[f"free_{name}"] = median(free_us)
        result[f"{phase}_ratio"] = median(ratios)
        result[f"{phase}_ratio_min"] = min(ratios)
        result[f"{phase}_ratio_max"] = max(ratios)
    return result


def greatest_gap(runs: list[dict[str, float]]) -> float:
    """The greatest difference of a sampled and a training logprob."""
    return max(figures["gap_max"] for figures in runs)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="that count, after one that does not")
    parser.set_defaults(lr=0.0)
    args = parser.parse_args()
    loop = GrpoLoop(args)
    modes = {"strict": nullcontext, "free": free}
    runs: dict[str, list[dict[str, float]]] = {"strict": [], "free": []}
    for number in range(1 + args.rounds):
        for mode, context in modes.items():
            with context():
                figures = run(loop, number)
            if number > 0:
                print_figures({mode: number} | figures)
                runs[mode].append(figures)
    strict_gap = greatest_gap(runs["strict"])
    free_gap = greatest_gap(runs["free"])
    if strict_gap != 0:
        raise AssertionError(f"strict has a gap of {strict_gap}")
    if free_gap == 0:
        raise AssertionError("free has no gap: nothing was switched off")
    print_result(
        what="minirl_strict",
        dtype=args.dtype,
        rounds=args.rounds,
        strict_gap_max=strict_gap,
        free_gap_max=free_gap,
        free_equal_frac=median(figures["equal_frac"] for figures in runs["free"]),
        **summarize(runs["strict"], runs["free"]),
    )


if __name__ == "__main__":
    main()
    process_group.stop()
