"""Compile Triton kernels for the architectures that minirl runs on; it takes no GPU. A program, run by test_fused.

A process of its own, since kernels that were made under the interpreter cannot be compiled.
"""

from collections.abc import Callable, Mapping
from typing import Any

ARCHITECTURES = (80, 90, 100, 120)


def compile_for_all(make_kernel: Callable[[], Any], types: Mapping[str, str], **constants: int) -> None:
    """types: "*fp32" and the like of the arguments that are not compile-time constants, by name and in order."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = make_kernel()
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    for architecture in ARCHITECTURES:
        source = ASTSource(kernel, signature, constexprs=constants)
        triton.compile(source, target=GPUTarget("cuda", architecture, 32))


def main() -> None:
    from minirl.kernels import fused_gate, fused_head, fused_rotation, fused_sampling
    from minirl.model.padding import next_power_of_two

    heads = ("q", "k", "cos", "sin", "rotated_q", "rotated_k")
    rotation_types = {name: "*fp32" if name in ("cos", "sin") else "*bf16" for name in heads}
    for dim in (64, 80):
        compile_for_all(
            fused_rotation.rotation_kernel,
            rotation_types,
            DIRECTION=-1,
            NUM_HEADS=14,
            NUM_KV=2,
            HALF=dim // 2,
            PADDED_HALF=next_power_of_two(dim // 2),
        )
    tensors = dict.fromkeys(("gate", "up", "out", "grad", "grad_gate", "grad_up"), "*bf16")
    for make_kernel in (fused_gate.gate_kernel, fused_gate.gate_gradient_kernel):
        compile_for_all(make_kernel, {**tensors, "size": "i32"}, TILE=fused_gate.TILE)
    compile_for_all(
        fused_sampling.blocks_kernel,
        {
            "logits": "*fp32",
            "temperature": "*fp32",
            "greatest": "*fp32",
            "likeliest": "*i32",
            "totals": "*fp64",
            "vocab_size": "i32",
        },
        BLOCK=fused_sampling.BLOCK,
    )
    compile_for_all(
        fused_sampling.tokens_kernel,
        {
            "logits": "*fp32",
            "temperature": "*fp32",
            "uniform": "*fp64",
            "greatest": "*fp32",
            "likeliest": "*i32",
            "totals": "*fp64",
            "tokens": "*i64",
            "logprobs": "*fp32",
            "vocab_size": "i32",
            "num_blocks": "i32",
        },
        BLOCK=fused_sampling.BLOCK,
        PADDED_BLOCKS=512,
    )
    rows = {"targets": "*i64", "divisor": "*fp32", "totals": "*fp32", "entropies": "*fp32"}
    chunk = {"first": "i32", "width": "i32"}
    compile_for_all(
        fused_head.statistics_kernel,
        {"logits": "*fp32", **rows, "target_logits": "*fp32", **chunk, "chunk": "i32", "num_chunks": "i32"},
        TILE=fused_head.TILE,
    )
    gradients = {"by_logprob": "*fp32", "by_entropy": "*fp32", "grad": "*bf16"}
    compile_for_all(
        fused_head.gradient_kernel,
        {"logits": "*fp32", **rows, **gradients, **chunk},
        TILE=fused_head.TILE,
    )


if __name__ == "__main__":
    main()
