"""Compile the decode kernel for several GPU generations, without a GPU, and report registers, spills and shared memory.

    python benchmarks/paged_resources.py [--dtypes bfloat16] [--dims 128] [--groups 1 8] [--sweep]

Needs Triton, whose package includes an assembler. Exits with code 1 if any kernel spills registers, or needs more
shared memory than the device allows per program.
"""

import argparse
import itertools
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch
from workload import docstring_parser

from minirl.extras.kernels import paged_attention
from minirl.model.attention import PAGED_BLOCK

# Maximum bytes of shared memory per program, keyed by compute capability x 10.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
TRITON_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
NUM_KV = 8
# Compile options that `gpu_check.py` compares on a GPU.
SETTINGS = [{"num_warps": warps, "num_stages": stages} for warps in (4, 8) for stages in (3, 4, 5)]


def resources(capability: int, dtype: torch.dtype, dim: int, groups: int) -> tuple[int, int, int]:
    """Return registers per thread, spilled bytes per thread, and bytes of shared memory per program."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    data = f"*{TRITON_TYPES[dtype]}"
    constants = paged_attention.constants(NUM_KV, groups, dim, PAGED_BLOCK, dtype)
    types = {"q": data, "keys": data, "values": data, "blocks": "*i32", "lengths": "*i32"}
    types |= {"means": data, "log_weights": "*fp32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}  # torch aligns its tensors
    types |= {"max_blocks": "i32", "window": "i32", "scale": "fp32"}
    source = ASTSource(
        paged_attention.attend_blocks,
        types | dict.fromkeys(constants, "constexpr"),
        constexprs={(len(types) + i,): value for i, value in enumerate(constants.values())},
        attrs=aligned,
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=paged_attention.OPTIONS
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Spilled registers go to the stack, which the kernel does not use otherwise.
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    return int(registers), int(stack), compiled.metadata.shared


def main() -> int:
    parser = docstring_parser(__doc__)
    dtypes = [str(dtype).removeprefix("torch.") for dtype in TRITON_TYPES]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 80, 128, 256])
    parser.add_argument("--groups", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--sweep", action="store_true", help="try all SETTINGS")
    args = parser.parse_args()
    # Use an empty cache, so that every kernel is compiled.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        return print_cases(args)


def print_cases(args: argparse.Namespace) -> int:
    """Print one line per case and return the exit code."""
    all_fit = True
    settings = SETTINGS if args.sweep else [paged_attention.OPTIONS]
    cases = itertools.product(SHARED_BYTES, settings, args.dtypes, args.dims, args.groups)
    for capability, paged_attention.OPTIONS, dtype, dim, groups in cases:
        most = SHARED_BYTES[capability]
        registers, spilled, shared = resources(capability, getattr(torch, dtype), dim, groups)
        fits = spilled == 0 and shared <= most
        all_fit &= fits
        print(
            f"sm_{capability} {paged_attention.OPTIONS} {dtype} dimension {dim} groups {groups}: "
            f"{registers} registers, {spilled} bytes spilled, {shared:,} of {most:,} bytes shared"
            f"{'' if fits else ' DOES NOT FIT'}",
            flush=True,
        )
    return 0 if all_fit else 1


if __name__ == "__main__":
    raise SystemExit(main())
