"""Decoding with a sliding window against decoding without: time of a step and cache blocks in use as completions grow.

    OMP_NUM_THREADS=1 python benchmarks/window.py [--rows 8] [--tokens 4096] [--dtype bfloat16]

A small random model, once with a window in every layer and once without; all rows grow together and none stops. The two
take turns span by span. A step is what the engine does in one: room in the cache, the layout, the forward pass, the
sample. Once the window is full its time and its blocks stay as they are.
"""

import argparse
import time
from collections.abc import Iterator
from statistics import median

import torch
from workload import print_result

from minirl.generation.kv_cache import KVCache
from minirl.generation.sampling import request_key, sample
from minirl.model.families import config_from_dict
from minirl.model.transformer import Transformer

SHAPE = {
    "model_type": "mistral",
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROMPT = 32


def make_model(window: int | None, args: argparse.Namespace) -> Transformer:
    """A random model; the weights do not depend on the window."""
    torch.manual_seed(0)
    config = config_from_dict(
        SHAPE | {"sliding_window": window, "max_position_embeddings": PROMPT + args.tokens}
    )
    return Transformer(config).to(getattr(torch, args.dtype))


@torch.no_grad()
def decode(window: int | None, args: argparse.Namespace) -> Iterator[tuple[float, int]]:
    """CPU seconds of each decode step, and the blocks that a pool has in use after it."""
    model = make_model(window, args)
    config = model.config
    cache = KVCache(
        config.layer_windows,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_query_groups=config.num_attention_heads // config.num_key_value_heads,
        num_tokens=args.rows * (PROMPT + args.tokens + 128),
        max_sequences=args.rows,
        dtype=getattr(torch, args.dtype),
        device=torch.device("cpu"),
    )
    num_blocks = cache.num_free_blocks
    keys = torch.tensor(
        [request_key(0, purpose="train", prompt_ordinal=row, sample=0) for row in range(args.rows)]
    )
    how = dict(keys=keys, temperature=torch.ones(args.rows))
    sequences = [cache.add(PROMPT) for _ in range(args.rows)]
    assert all(sequences), "the cache holds every row"
    layout = cache.prefill_layout(sequences)
    hidden = model(torch.randint(config.vocab_size, (args.rows * PROMPT,)), layout.positions, layout)[
        PROMPT - 1 :: PROMPT
    ]
    positions = torch.full((args.rows,), PROMPT)
    for _ in range(args.tokens):
        start = time.process_time()
        tokens, _ = sample(hidden, model.lm_head.weight, positions=positions, **how)
        assert all(cache.extend(sequence) for sequence in sequences), "the cache holds every row"
        layout = cache.decode_layout(sequences)
        hidden = model(tokens, layout.positions, layout)
        positions = positions + 1
        yield time.process_time() - start, num_blocks - cache.num_free_blocks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="sampled per row")
    parser.add_argument("--span", type=int, default=256, help="tokens per line of the table")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = {"window": decode(args.window, args), "full": decode(None, args)}
    print(
        f"| tokens | ms/step, window {args.window} | ms/step, none | blocks, window {args.window} | blocks, none |"
    )
    print("|---|---|---|---|---|")
    table: list[dict[str, tuple[float, int]]] = []
    for end in range(args.span, args.tokens + 1, args.span):
        row = {}
        for name, steps in runs.items():
            seconds, blocks = zip(*(next(steps) for _ in range(args.span)), strict=True)
            row[name] = (1e3 * median(seconds), max(blocks))
        (ms, used), (full_ms, full_used) = row["window"], row["full"]
        print(f"| {end} | {ms:.2f} | {full_ms:.2f} | {used} | {full_used} |", flush=True)
        table.append(row)
    first = next(
        i for i in range(len(table)) if i * args.span >= args.window
    )  # the first span with a full window
    result = {"what": "minirl_window", "dtype": args.dtype, "window": args.window, "rows": args.rows}
    for name in runs:
        for label, i in (("filled", first), ("last", -1)):
            result |= {f"{name}_{label}_ms": table[i][name][0], f"{name}_{label}_blocks": table[i][name][1]}
    print_result(**result, tokens=args.tokens)


if __name__ == "__main__":
    main()
