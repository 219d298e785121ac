"""Decoding with a sliding window and without: the time of a step and the cache blocks in use as completions grow.

    OMP_NUM_THREADS=1 python benchmarks/window.py [--sequences 8] [--tokens 4096] [--dtype bfloat16]

A small random model, once with a window in every layer and once without. All sequences grow together and none stops.
The two models take turns, --span tokens at a time. A step is the engine's: extending the sequences in the cache,
the layout, the forward pass and the sample. Once the window is full, its time and its blocks should stay
constant.
"""

import argparse
import itertools
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
PROMPT_LENGTH = 32


def make_model(window: int | None, args: argparse.Namespace) -> Transformer:
    """A random model; the weights do not depend on the window."""
    torch.manual_seed(0)
    max_length = PROMPT_LENGTH + args.tokens
    config = config_from_dict(SHAPE | {"sliding_window": window, "max_position_embeddings": max_length})
    return Transformer(config).to(getattr(torch, args.dtype))


@torch.no_grad()
def decode(window: int | None, args: argparse.Namespace) -> Iterator[tuple[float, int]]:
    """CPU seconds of each decode step, and the blocks in use in one cache pool after it."""
    model = make_model(window, args)
    config = model.config
    cache = KVCache(
        config.attention_windows,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_query_groups=config.num_attention_heads // config.num_key_value_heads,
        num_tokens=args.sequences * (PROMPT_LENGTH + args.tokens + 128),
        max_sequences=args.sequences,
        dtype=getattr(torch, args.dtype),
        device=torch.device("cpu"),
    )
    num_blocks = cache.num_free_blocks
    keys = [request_key(0, purpose="train", prompt_ordinal=i, sample=0) for i in range(args.sequences)]
    noise_keys = torch.tensor(keys)
    temperature = torch.ones(args.sequences)

    sequences = [cache.add(PROMPT_LENGTH) for _ in range(args.sequences)]
    assert None not in sequences, "the cache is large enough"
    layout = cache.prefill_layout(sequences)
    prompts = torch.randint(config.vocab_size, (args.sequences * PROMPT_LENGTH,))
    hidden = model(prompts, layout.positions, layout)
    hidden = hidden[PROMPT_LENGTH - 1 :: PROMPT_LENGTH]  # the last token's of each prompt
    positions = torch.full((args.sequences,), PROMPT_LENGTH)
    for _ in range(args.tokens):
        start = time.process_time()
        tokens, _, _ = sample(
            hidden, model.lm_head.weight, keys=noise_keys, positions=positions, temperature=temperature
        )
        assert all(cache.extend(sequence) for sequence in sequences), "the cache is large enough"
        layout = cache.decode_layout(torch.tensor(sequences))
        hidden = model(tokens, layout.positions, layout)
        positions = positions + 1
        yield time.process_time() - start, num_blocks - cache.num_free_blocks


def measure_span(steps: Iterator[tuple[float, int]], span: int) -> tuple[float, int]:
    """Median milliseconds of the next `span` steps, and the greatest number of blocks in use."""
    milliseconds = []
    used = []
    for seconds, num_blocks in itertools.islice(steps, span):
        milliseconds.append(1e3 * seconds)
        used.append(num_blocks)
    return median(milliseconds), max(used)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="sampled per sequence")
    parser.add_argument("--span", type=int, default=256, help="tokens per line of the table")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    runs = {"window": decode(args.window, args), "full": decode(None, args)}
    print(
        f"| tokens | ms/step, window {args.window} | ms/step, none | blocks, window {args.window} | blocks, none |"
    )
    print("|---|---|---|---|---|")
    table: list[dict[str, tuple[float, int]]] = []
    for end in range(args.span, args.tokens + 1, args.span):
        line = {name: measure_span(steps, args.span) for name, steps in runs.items()}
        ms, used = line["window"]
        full_ms, full_used = line["full"]
        print(f"| {end} | {ms:.2f} | {full_ms:.2f} | {used} | {full_used} |", flush=True)
        table.append(line)

    # The first span that begins with a full window.
    first_filled = -(-args.window // args.span)
    result: dict[str, float] = {}
    for name in runs:
        for label, line in (("filled", table[first_filled]), ("last", table[-1])):
            ms, used = line[name]
            result[f"{name}_{label}_ms"] = ms
            result[f"{name}_{label}_blocks"] = used
    print_result(
        what="minirl_window",
        dtype=args.dtype,
        window=args.window,
        sequences=args.sequences,
        tokens=args.tokens,
        **result,
    )


if __name__ == "__main__":
    main()
