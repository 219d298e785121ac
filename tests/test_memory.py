"""The formulas of docs/memory.md are the bytes that are really allocated."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minirl.generation.kv_cache import KVCache
from minirl.generation.sampling import sample
from minirl.model import attention
from minirl.model.config import ModelConfig
from minirl.model.families import config_from_dict, read_config
from minirl.model.transformer import Transformer
from minirl.ranks.process_group import world_size
from minirl.training.batch import Batch
from minirl.training.scoring import score_batch
from minirl.training.sharded_model import ShardedModel
from support.memory import allocated_bytes, saved_bytes
from support.models import RAW_CONFIG, make_folder

PAGE = (Path(__file__).parent.parent / "docs" / "memory.md").read_text()
CPU = torch.device("cpu")
SHAPES = [
    # hidden, MLP, layers, query heads, key heads, channels of a head, tokens
    (256, 1024, 4, 8, 2, 32, 512),
    (512, 1024, 2, 4, 2, 64, 512),
    (384, 2048, 4, 6, 2, 64, 1024),
]


def formula(row: str, **sizes: float) -> float:
    """The value of the formula in the table's row that begins with `row`, by the letters of the page."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    text = line.split("|")[2].removeprefix(" CUDA:")
    text = re.split("[;a-z]", text)[0].strip()
    assert re.fullmatch(r"[A-Z0-9 .+*/()-]+", text), text
    product = re.sub(r"(?<=[A-Z0-9)]) (?=[A-Z0-9(])", " * ", text)
    return eval(product, {}, sizes)


def make_config(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, tokens: int
) -> ModelConfig:
    return config_from_dict(
        {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": tokens,
            "rms_norm_eps": 1e-6,
        }
    )


def sizes_of(config: ModelConfig) -> dict[str, float]:
    head_dim = config.head_dim
    return {
        "L": config.num_hidden_layers,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "H": config.num_attention_heads,
        "Q": config.num_attention_heads * head_dim,
        "K": config.num_key_value_heads * head_dim,
    }


def make_batch(num_tokens: int) -> Batch:
    return Batch(
        (num_tokens,),
        tokens=torch.arange(num_tokens) % 64,
        loss_mask=torch.arange(num_tokens) > 0,
        sample_logprobs=torch.zeros(num_tokens),
    )


class FusedNorm(torch.autograd.Function):
    """Saves what the fused norm of CUDA saves; torch has no such kernel for meta tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size, weight: Tensor, eps: float) -> Tensor:
        inverse_rms = x.new_empty(len(x), 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse_rms)
        return torch.empty_like(x)


def bytes_of_training(rank: int, folder: Path) -> dict[str, float]:
    """What a rank has after each part of an update, by the row of the table."""
    model = ShardedModel(read_config(folder), folder, dtype=torch.bfloat16, device=CPU)
    optimizer = model.make_optimizer(betas=(0.9, 0.95), weight_decay=0.0)
    batch = make_batch(33).replace(tokens=torch.arange(33))

    def backward(*, is_last: bool) -> None:
        logprobs, _ = score_batch(model.module, batch, temperature=1.0)
        model.backward(logprobs.sum(), is_last=is_last)

    with torch.no_grad():
        score_batch(model.module, batch, temperature=1.0)  # makes the rope table, which stays
    _, gradients = allocated_bytes(lambda: backward(is_last=False))
    backward(is_last=True)
    sharded = sum(master.grad.to_local().nbytes for master in model.masters.values())
    model.step(optimizer, lr=0.1, max_grad_norm=1.0)
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    return {
        "weights, shared by generate, score and update": sum(
            w.nbytes for w in model.compute_weights.values()
        ),
        "masters and two moments": sum(t.to_local().nbytes for t in [*model.masters.values(), *moments]),
        "gradients, summed over microbatches": gradients,
        "gradients, sharded over the ranks after the last microbatch": sharded,
        "P": sum(w.numel() for w in model.compute_weights.values()),
        "W": world_size(),
    }


def test_weights_optimizer_and_gradients_are_the_table_s(one_rank, two_ranks, tmp_path):
    raw = {**RAW_CONFIG, "hidden_size": 128, "intermediate_size": 256}
    folder = make_folder(tmp_path / "model", raw)
    for pool in (one_rank, two_ranks):
        for measured in pool.run(bytes_of_training, folder):
            sizes = {name: measured.pop(name) for name in ("P", "W")}
            for row, num_bytes in measured.items():
                assert num_bytes == pytest.approx(formula(row, **sizes), rel=0.02), row


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cached_token_has_the_table_s_bytes(shape):
    config = make_config(*shape)
    cache = KVCache(
        config.layer_windows,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_query_groups=config.num_attention_heads // config.num_key_value_heads,
        num_tokens=4096,
        max_sequences=1,
        dtype=torch.bfloat16,
        device=CPU,
    )
    num_bytes = sum(pool.keys.nbytes + pool.values.nbytes for pool in cache.pools)
    assert num_bytes == pytest.approx(4096 * formula("cached token", **sizes_of(config)), rel=0.02)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_update_on_the_cpu_peaks_where_the_table_says(shape, recompute):
    """The second of two microbatches: the gradients exist already."""
    config = make_config(*shape)
    num_tokens = shape[-1]
    model = Transformer(config, recompute_layers=recompute)
    batch = make_batch(num_tokens)

    def backward() -> None:
        logprobs, _ = score_batch(model, batch, temperature=1.0)
        logprobs.sum().backward()

    backward()
    peak, stays = allocated_bytes(backward)
    assert stays == 0
    sizes = sizes_of(config)
    # A block of queries sees the tokens before it and itself.
    sizes["S"] = num_tokens / 2 + 32
    sizes["A"] = formula("a layer's activations of a token, A, CPU in fp32", **sizes)
    expected = formula("token of a microbatch", **sizes)
    if recompute:
        # In fp32 the states between the layers take twice the bytes.
        doubled = sizes | {"L": 2 * sizes["L"]}
        expected = formula("token of a microbatch with `--recompute-layers`", **doubled)
    assert peak == pytest.approx(num_tokens * expected, rel=0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_on_cuda_saves_what_the_table_says(shape, monkeypatch):
    """Counted on meta tensors: torch's attention for sequences of varying lengths, and a fused norm."""
    monkeypatch.setattr(attention, "kernel_for", lambda device, dtype: "varlen")
    monkeypatch.setattr(torch.nn.functional, "rms_norm", FusedNorm.apply)
    config = make_config(*shape)
    batch = make_batch(shape[-1])
    layout = batch.layout()
    with torch.device("meta"):
        model = Transformer(config).to(torch.bfloat16)
    layer = model.model.layers[0]
    x = torch.empty(shape[-1], config.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    rope = torch.empty(shape[-1], 1, config.head_dim, device="meta")
    num_bytes = saved_bytes(layer, lambda: layer(x, rope, rope, layout)) - rope.nbytes
    expected = formula("a layer's activations of a token, A", **sizes_of(config))
    assert num_bytes == pytest.approx(shape[-1] * expected, rel=0.02)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_decode_step_s_logits_have_the_table_s_bytes(temperature):
    num_requests, vocab = 32, 30_000
    hidden = torch.randn(num_requests, 64, dtype=torch.bfloat16)
    head = torch.randn(vocab, 64, dtype=torch.bfloat16)
    request = torch.arange(num_requests)
    temperatures = torch.full((num_requests,), temperature)
    peak, _ = allocated_bytes(
        lambda: sample(hidden, head, keys=request, positions=request, temperature=temperatures)
    )
    row = "logits of a decode step, each request"
    assert peak == pytest.approx(num_requests * formula(row, V=vocab), rel=0.1)


def test_the_example_follows_from_the_table():
    """Its numbers, in the order of the page."""
    example = PAGE[PAGE.index("Qwen2.5-1.5B") :]
    sizes = {name: float(number) for name, number in re.findall(r"\b([A-Z]) ([\d.e]+)", example)}
    sizes["W"] = 8
    sizes["A"] = formula("a layer's activations of a token, A", **sizes)
    token = formula("token of a microbatch", **sizes)
    recomputed = formula("token of a microbatch with `--recompute-layers`", **sizes)
    expected = [
        formula("weights, shared by generate, score and update", **sizes) / 1e9,
        formula("masters and two moments", **sizes) / 1e9,
        formula("cached token", **sizes) * 1e6 / 1e9,
        formula("gradients, summed over microbatches", **sizes) / 1e9,
        token / 1e6,
        8192 * token / 1e9,
        8192 * recomputed / 1e9,
    ]
    found = [float(number) for number in re.findall(r"([\d.]+) (?:GB|MB)\b", example.partition("GB:")[2])]
    assert found == pytest.approx(expected, rel=0.03)
