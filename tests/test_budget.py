"""Memory budget: chosen sizes fit, more memory never makes a run slower, and predicted bytes match measured ones."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from minirl.generation.kv_cache import KVCache
from minirl.model import attention
from minirl.model.config import Adapters
from minirl.model.families import config_from_dict
from minirl.model.transformer import DecoderLayer
from minirl.run import budget as module
from minirl.run.budget import USABLE_FRACTION, Sizes, choose_sizes, compute_budget
from minirl.run.planning import free_memory
from minirl.training.batch import Batch, sequence_infos_from_lengths
from support import models
from support.engines import CPU, cached_model
from support.families import PUBLISHED
from support.memory import make_workload, saved_bytes

QWEN_1_5B, QWEN_7B, QWEN_32B = map(config_from_dict, (models.QWEN_1_5B, models.QWEN_7B, models.QWEN_32B))
TOGETHER = {"shard_weights": True, "shard_gradients": True}


def test_free_memory_is_limited_by_the_tightest_cgroup(tmp_path):
    """Covers both cgroup versions, reclaimable page cache, and a container that sees its path on the host."""

    def write(folder, **numbers):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, number in numbers.items():
            (tmp_path / folder / f"memory.{name}").write_text(f"{number}\n")

    write("proc/self")
    (tmp_path / "proc/meminfo").write_text("MemAvailable:    2000 kB")
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/\n5:memory:/a/b\n0::/of/host\n")
    write("sys/fs/cgroup", max="max", current=900, stat="inactive_file 10")
    assert free_memory(tmp_path) == 2048_000
    for folder, limit in {"a": 1500, "a/b": 2000}.items():
        stat = "inactive_file 3\ntotal_inactive_file 7"
        write(f"sys/fs/cgroup/memory/{folder}", limit_in_bytes=limit, usage_in_bytes=600, stat=stat)
    assert free_memory(tmp_path) == 907
    write("sys/fs/cgroup", max=1000)
    assert free_memory(tmp_path) == 110


WORKLOADS = {
    "1.5B": make_workload(QWEN_1_5B),
    "7B on 8": make_workload(QWEN_7B, 8, frozen_models={"reference": QWEN_7B}),
    "7B with the optimizer on the host": make_workload(QWEN_7B, offloads_optimizer=True),
    "LoRA 7B": make_workload(replace(QWEN_7B, adapters=Adapters(16))),
    "32B from shards": make_workload(QWEN_32B, 8, offloads_optimizer=True, max_sequence_tokens=4396),
    "evaluation of 7B": make_workload(QWEN_7B, trains=False, frozen_models={"reward_model": QWEN_7B}),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_chosen_sizes_fit_with_a_margin_and_more_memory_makes_no_run_slower(name):
    """Decoding and training fit in turns, or at the same time if the cache stays. No run fits on the smallest GPU."""
    slower = Sizes(0, 0, 0, recompute_layers=True, shard_gradients=True)
    fitted = []
    for free in (1e9, 10e9, 20e9, 40e9, 60e9, 80e9, 160e9):
        work = replace(WORKLOADS[name], free_bytes=free)
        needed = choose_sizes(work, TOGETHER if work.trained_models == [QWEN_32B] else {})
        sizes = needed.sizes
        fitted.append(needed.fits())
        if not fitted[-1]:
            continue
        always, *phases = (
            sum(part.values()) for part in (needed.always_bytes, needed.training_bytes, needed.decoding_bytes)
        )
        most = sum(phases) if needed.fits(keeps_cache=True) else max(phases)
        assert always + most <= USABLE_FRACTION * free
        assert sizes.recompute_layers <= slower.recompute_layers
        assert sizes.max_tokens_per_microbatch >= slower.max_tokens_per_microbatch
        slower = sizes
        if free >= 80e9:
            assert sizes.max_tokens_per_microbatch == 8192
            assert sizes.cache_tokens >= 32 * work.max_sequence_tokens
    assert fitted == sorted(fitted)
    assert fitted[0] < fitted[-2]


class FusedNorm(torch.autograd.Function):
    """Norm that saves the same tensors as CUDA's fused norm, which has no kernel for meta tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size, weight: Tensor, eps: float) -> Tensor:
        inverse_rms = x.new_empty(len(x), 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse_rms)
        return torch.empty_like(x)


def test_a_layer_of_each_family_saves_what_the_budget_says(monkeypatch):
    """The estimate is within 15 %, on meta tensors with torch 2.11's attention and a fused norm."""
    monkeypatch.setattr(attention, "kernel_for", lambda *given: "varlen")
    monkeypatch.setattr(attention, "supports_gqa", lambda varlen_attn: False)
    monkeypatch.setattr(torch.nn.functional, "rms_norm", FusedNorm.apply)
    layout = Batch(sequence_infos_from_lengths([64]), torch.arange(64), torch.arange(64) > 0).layout()
    for name, (raw, _) in PUBLISHED.items():
        config = config_from_dict(raw)
        rotation = torch.empty(2, 64, 1, 2 * len(config.layer_ropes[0].frequencies), device="meta")

        def bytes_of(number, config=config, rotation=rotation):
            with torch.device("meta"):
                layer = DecoderLayer(config, number).to(torch.bfloat16)
                x = torch.empty(64, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            return saved_bytes(layer, partial(layer, x, rotation, layout)) - rotation.nbytes

        delta_nets = config.delta_net.layers if config.delta_net else ()
        saved = sum(
            len(layers) * bytes_of(min(layers)) for layers in (config.attention_windows, delta_nets) if layers
        )
        counted = 64 * config.num_hidden_layers * module._layer_bytes_per_token(make_workload(config), config)
        assert 0.85 * saved <= counted <= 1.15 * saved, name


def test_the_cache_takes_what_the_budget_says():
    """With Gated DeltaNet layers, requests include states. The pool of CUDA graphs holds logits a second time."""
    config = cached_model("states", torch.float32).config
    options = {"num_tokens": 4096, "max_sequences": 3, "dtype": torch.bfloat16, "device": CPU}
    cache = KVCache(config, **options)
    work, sizes = make_workload(config), Sizes(4, 4096, 812, recompute_layers=True, shard_gradients=False)
    needed = compute_budget(work, sizes)
    assert needed.decoding_bytes["cache"] == cache.pool.keys.nbytes + cache.pool.values.nbytes
    of_states = sum(
        pool.nbytes for layer in config.delta_net.layers for pool in cache.pool.recurrent_states.layers[layer]
    )
    assert needed.decoding_bytes["requests"] == of_states + 4 * 2 * 16 * config.vocab_size
    eager = compute_budget(work, replace(sizes, shard_weights=True))
    assert eager.decoding_bytes["requests"] == of_states + 4 * 16 * config.vocab_size
