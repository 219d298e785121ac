"""Decoding from shards on H100s, modelled: the time of a decode step, and tokens an hour over those with whole weights.

    PYTHONPATH=. python benchmarks/shard_decode.py [--model 32B] [--ranks 8] [--gather-us 10 20] [--context 2048]
        [--lengths lognormal:2200:16384:1.1] [--prompts 64] [--group 8]

A kernel takes its launch, or its bytes or flops if they take longer. A gather takes `--gather-us` and its bytes. The
second table has the steps of `rounds.py`, each engine on a group of ranks. Neither has the omissions of `rounds.py`,
or the gathers of training, which overlap with its products. No GPU has checked them.
"""

import argparse
from dataclasses import dataclass

from rounds import Simulation, Workload

MEMORY = 3.0e12  # bytes a second
LINK = 350e9  # bytes a second that a rank receives over NVLink
FLOPS = 600e12  # a second, of the products of a decode step
TRAIN_FLOPS = 400e12
LAUNCH_S = 2.5e-6  # of a kernel in a CUDA graph
SMALL_KERNELS = 9  # of a layer, whose bytes are few: norms, rope, the cache's new tokens, the gate
SAMPLING_KERNELS = 45
SWITCH_S = 1.0  # between generation and update


@dataclass(frozen=True)
class Shape:
    """Of a Llama or a Qwen. Heads have 128 channels."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def products(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's products: queries, keys, values, output, gate, up, down."""
        queries, keys = 128 * self.heads, 128 * self.kv_heads
        attention = [(self.hidden, size) for size in (queries, keys, keys)] + [(queries, self.hidden)]
        return attention + 2 * [(self.hidden, self.inner)] + [(self.inner, self.hidden)]

    @property
    def parameters(self) -> int:
        """Those that a token is multiplied with."""
        layer = sum(inputs * outputs for inputs, outputs in self.products)
        return self.layers * layer + self.vocab * self.hidden

    @property
    def cached_bytes(self) -> int:
        """Keys and values of a token."""
        return 2 * 2 * 128 * self.kv_heads * self.layers

    @property
    def gathered_bytes(self) -> int:
        """Of a token: in each layer the attention's and the MLP's inner columns, and their outputs."""
        return 2 * self.layers * (128 * self.heads + self.inner + 2 * self.hidden)


SHAPES = {
    "7B": Shape(28, 3584, 18944, 28, 4, 152064),
    "8B": Shape(32, 4096, 14336, 32, 8, 128256),
    "14B": Shape(48, 5120, 13824, 40, 8, 152064),
    "32B": Shape(64, 5120, 27648, 40, 8, 152064),
    "70B": Shape(80, 8192, 28672, 64, 8, 128256),
}


def step_parts(shape: Shape, ranks: int, *, rows: int, context: int, gather_s: float) -> dict[str, float]:
    """The seconds of a decode step of `rows` rows, on `ranks` ranks that have the model together, by cause."""

    def product(inputs: int, outputs: int) -> float:
        num_bytes = 2 * (inputs * outputs / ranks + rows * (inputs + outputs / ranks))
        return max(LAUNCH_S, num_bytes / MEMORY, 2 * rows * inputs * outputs / ranks / FLOPS)

    layer = sum(product(*sizes) for sizes in shape.products)
    cache = rows * context * shape.cached_bytes / ranks / MEMORY
    parts = {
        "products": shape.layers * layer + product(shape.hidden, shape.vocab),
        "cache": max(shape.layers * LAUNCH_S, cache),
        "small": LAUNCH_S * (shape.layers * SMALL_KERNELS + SAMPLING_KERNELS),
        "gathers": 0.0,
    }
    if ranks > 1:
        # Each is put into the order of columns by another kernel. Logits are in fp32.
        num_gathers = 4 * shape.layers + 2
        gathered = rows * (shape.gathered_bytes + 4 * shape.vocab + 2 * shape.hidden)
        parts["small"] += LAUNCH_S * num_gathers
        parts["gathers"] = num_gathers * gather_s + gathered * (1 - 1 / ranks) / LINK
    return parts


def costs(shape: Shape, ranks: int, gather_s: float) -> tuple[float, ...]:
    """The costs of an engine on `ranks` ranks, as `rounds.py` has them: linear between 1 row and 256."""

    def step_s(rows: int) -> float:
        return sum(step_parts(shape, ranks, rows=rows, context=0, gather_s=gather_s).values())

    row_s = (step_s(256) - step_s(1)) / 255
    sent = shape.gathered_bytes * (1 - 1 / ranks) / LINK
    flops = 2 * shape.parameters
    return (
        step_s(1) - row_s,
        row_s,
        shape.cached_bytes / ranks / MEMORY,
        flops / ranks / TRAIN_FLOPS + sent,
        # A reference scores too. All ranks train; `rounds.py` divides by the engines.
        4 * flops / TRAIN_FLOPS / ranks,
        SWITCH_S,
    )


def print_steps(shape: Shape, args: argparse.Namespace) -> None:
    print("rows  ranks  us a gather  ms a step  products  cache  small  gathers  tokens/s of all ranks")
    for rows in (64, 256):
        for ranks in args.widths:
            for gather_us in args.gather_us if ranks > 1 else [0.0]:
                parts = step_parts(shape, ranks, rows=rows, context=args.context, gather_s=1e-6 * gather_us)
                step_s = sum(parts.values())
                listed = "  ".join(f"{1e3 * seconds:6.2f}" for seconds in parts.values())
                rate = args.ranks // ranks * rows / step_s
                print(f"{rows:4}  {ranks:5}  {gather_us:11.0f}  {1e3 * step_s:9.2f}  {listed}  {rate:10,.0f}")


def print_rates(shape: Shape, args: argparse.Namespace) -> None:
    print("ranks  us a gather  tokens an hour  decode steps")
    whole = 0.0
    for ranks in args.widths:
        for gather_us in args.gather_us if ranks > 1 else [0.0]:
            engines = argparse.Namespace(**{**vars(args), "ranks": args.ranks // ranks})
            workload = Workload(engines)
            simulation = Simulation(engines, costs(shape, ranks, 1e-6 * gather_us), 0, workload)
            steps = [simulation.run_step() for _ in range(args.steps)]
            rate = sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)
            whole = whole or rate
            decode_steps = sum(step["decode_steps"] for step in steps) / args.steps
            print(f"{ranks:5}  {gather_us:11.0f}  {rate / whole:13.2f}x  {decode_steps:12.0f}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="32B", choices=SHAPES)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--gather-us", type=float, nargs="+", default=[10.0, 20.0])
    parser.add_argument(
        "--context", type=int, default=2048, help="cached tokens of a row, in the first table"
    )
    parser.add_argument("--lengths", default="lognormal:2200:16384:1.1")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    heads = SHAPES[args.model].kv_heads
    args.widths = [n for n in range(1, args.ranks + 1) if args.ranks % n == 0 == heads % n]
    args.turns, args.reply_seconds, args.reward_seconds, args.reward_workers = 1, 0.0, 0.0, 1
    return args


def main() -> None:
    args = parse_args()
    shape = SHAPES[args.model]
    print_steps(shape, args)
    print_rates(shape, args)


if __name__ == "__main__":
    main()
