"""Compile Triton kernels for the architectures that minirl runs on; it takes no GPU. A program, run by test_fused.

A separate process, since kernels made under the interpreter cannot be compiled.
"""

from collections.abc import Mapping
from typing import Any

ARCHITECTURES = (80, 90, 100, 120)


def compile_for_all(kernel: Any, arguments: Mapping[str, str], **constants: int) -> None:
    """arguments: by type, "*fp32" and the like, the names of those that are not compile-time constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: kind for kind, names in arguments.items() for name in names.split()}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    for architecture in ARCHITECTURES:
        source = ASTSource(kernel, signature, constexprs=constants)
        triton.compile(source, target=GPUTarget("cuda", architecture, 32))


def main() -> None:
    from minirl.kernels import fused_gate, fused_head, fused_rotation, fused_sampling
    from minirl.model.padding import next_power_of_two

    heads = {"*bf16": "q k rotated_q rotated_k", "*fp32": "cos sin"}
    for dim in (64, 80):
        half = {"HALF": dim // 2, "PADDED_HALF": next_power_of_two(dim // 2)}
        compile_for_all(fused_rotation.rotation_kernel, heads, DIRECTION=-1, NUM_HEADS=14, NUM_KV=2, **half)
    tensors = {"*bf16": "gate up out grad grad_gate grad_up", "i32": "size"}
    for kernel in (fused_gate.gate_kernel, fused_gate.gate_gradient_kernel):
        compile_for_all(kernel, tensors, TILE=fused_gate.TILE)
    sums = {"*i32": "likeliest", "*fp64": "totals uniform", "*i64": "tokens", "i32": "vocab_size num_blocks"}
    sums["*fp32"] = "logits temperature greatest logprobs"
    compile_for_all(fused_sampling.blocks_kernel, sums, BLOCK=fused_sampling.BLOCK)
    compile_for_all(fused_sampling.tokens_kernel, sums, BLOCK=fused_sampling.BLOCK, PADDED_BLOCKS=512)
    rows = {"*i64": "targets", "*bf16": "grad", "i32": "first width chunk num_chunks"}
    rows["*fp32"] = "logits divisor totals entropies target_logits by_logprob by_entropy"
    for kernel in (fused_head.statistics_kernel, fused_head.gradient_kernel):
        compile_for_all(kernel, rows, TILE=fused_head.TILE)


if __name__ == "__main__":
    main()
