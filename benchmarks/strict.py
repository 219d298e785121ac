"""What it costs that sampled and training logprobs are equal bit for bit: minirl against itself without it. On the CPU.

    OMP_NUM_THREADS=1 python benchmarks/strict.py MODEL [--dtype bfloat16]

"free" is the same engine, scoring and update with torch's `scaled_dot_product_attention` for both kinds of attention
(sequence by sequence in packed streams, shared prompts repeated; decoding over each row's keys, gathered and padded)
and plain `F.linear` for all products, patched in here and nowhere else. The two take turns; within a round both answer
the same requests under the same weights (the learning rate is 0). Reported are CPU seconds per sampled token and per
trained token, the ratios strict / free round by round, and the gap of the logprobs, so that both are seen to be what
they are called.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from unittest.mock import patch

import torch
import torch.nn.functional as F
from grpo_step import GrpoLoop, make_parser
from torch import Tensor
from workload import PhaseClock, print_result, print_row

import minirl.model.transformer
from minirl.model import batch_invariance
from minirl.model.attention import DecodeLayout, Layout
from minirl.ranks import process_group


def cached_keys(layout: DecodeLayout, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [B, K, S, C] of each row, padded to the longest, and the position of its first key [B]."""
    cached, index = layout.caches[layer]
    assert cached.read is not None, "a layout to decode from"
    table = cached.read.blocks.long()  # [B, n], the rows' blocks in order

    def gathered(blocks: Tensor) -> Tensor:
        rows = blocks.index_select(0, table.flatten()).unflatten(0, table.shape)  # [B, n, K, BLOCK, C]
        return rows.transpose(1, 2).flatten(2, 3)

    keys, values = cached.pool.keys[index].transpose(-1, -2), cached.pool.values[index]
    return gathered(keys), gathered(values), layout.positions + 1 - cached.read.lengths


def free_attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, layer: int, window: int | None) -> Tensor:
    """`minirl.model.attention.attend` by `scaled_dot_product_attention`."""
    assert window is None, "this benchmark is for models without a window"
    if layer in layout.caches:
        cached, index = layout.caches[layer]
        cached.store(index, k, v)
    if isinstance(layout, DecodeLayout):
        keys, values, first = cached_keys(layout, layer)
        seen = first[:, None] + torch.arange(keys.shape[2]) <= layout.positions[:, None]
        groups = q.unflatten(
            1, (k.shape[1], -1)
        )  # [B, K, heads per key head, C]: they share the keys of their row
        return F.scaled_dot_product_attention(groups, keys, values, attn_mask=seen[:, None, None]).flatten(
            1, 2
        )
    whole = (x[layout.hidden_index].transpose(0, 1)[None].split(list(layout.lengths), 2) for x in (q, k, v))
    outputs = [
        F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True) for x in zip(*whole, strict=True)
    ]
    return torch.cat(outputs, 2)[0].transpose(0, 1)[layout.computed_tokens]


@contextmanager
def free() -> Iterator[None]:
    """Nothing is bitwise in the block."""
    with (
        patch.object(minirl.model.transformer, "attend", free_attend),
        patch.object(batch_invariance, "pad_rows", lambda x, multiple=1: x),
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
    return {
        "generate_us": 1e6 * clock.seconds["generate_cpu"] / int(batch.loss_mask.sum()),
        "update_us": 1e6 * clock.seconds["update_cpu"] / len(batch.tokens),
        "equal_frac": metrics["policy/logp_equal_frac"],
        "gap_max": metrics["policy/logp_gap_max"],
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="that count, after one that does not")
    parser.set_defaults(lr=0.0)
    args = parser.parse_args()
    loop, modes = GrpoLoop(args), {"strict": nullcontext, "free": free}
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for number in range(1 + args.rounds):
        for mode, context in modes.items():
            with context():
                row = run(loop, number)
            if number:
                print_row({mode: number} | row)
                rows[mode].append(row)
    gaps = {mode: max(row["gap_max"] for row in found) for mode, found in rows.items()}
    if gaps["strict"] or not gaps["free"]:
        raise AssertionError(f"greatest gaps {gaps}: strict must have none, free must have one")
    result: dict[str, float] = {"free_gap_max": gaps["free"]}
    result["free_equal_frac"] = median(row["equal_frac"] for row in rows["free"])
    for name in ("generate_us", "update_us"):
        ratios = [a[name] / b[name] for a, b in zip(rows["strict"], rows["free"], strict=True)]
        result |= {f"{mode}_{name}": median(row[name] for row in found) for mode, found in rows.items()}
        label = name.replace("_us", "_ratio")
        result |= {label: median(ratios), f"{label}_min": min(ratios), f"{label}_max": max(ratios)}
    print_result(
        what="minirl_strict", dtype=args.dtype, rounds=args.rounds, strict_gap_max=gaps["strict"], **result
    )


if __name__ == "__main__":
    main()
    process_group.stop()
