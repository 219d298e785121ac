"""The Triton kernel under its interpreter, on the CPU: what it computes is what the portable kernel computes."""

import pytest
import torch

from minirl.generation import kv_cache
from minirl.model import paged_attention, portable_attention
from support.caches import make_cache, poison
from support.engines import cached_model, make_engine, make_prompt, make_request, run
from support.interpreter import mend_interpreter, needs_interpreter

pytestmark = needs_interpreter

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch):
    mend_interpreter(monkeypatch)


@pytest.mark.parametrize(("groups", "dim"), [(1, 16), (7, 64), (3, 80)])
@pytest.mark.parametrize("window", [None, 1, 100, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_the_paged_kernel_equals_the_portable_one(window, groups, dim, dtype, tolerance):
    """Forks, block borders, windows that dropped blocks, shared key heads; what is not seen is not touched."""
    cache, rows = make_cache(window, groups, dim, dtype)
    pool, (cached, _) = cache.pools[0], cache.decode_layout(rows).caches[0]
    read, keys, values = cached.read, pool.keys[0], pool.values[0]
    q = 2 * torch.randn(len(rows), 2 * groups, dim, generator=torch.Generator().manual_seed(1))
    expected = portable_attention.decode(q, keys.float(), values.float(), read.index, read.mask)
    poison(cache, rows)
    wide = torch.full(
        (len(rows), 9), 10**6, dtype=torch.int32
    )  # beyond its blocks a row of the table is not read
    wide[:, : read.blocks.shape[1]] = read.blocks
    for table in (read.blocks, wide[:, : read.blocks.shape[1]]):
        got = paged_attention.decode(q.to(dtype), keys, values, table, read.lengths, window=window)
        assert got.dtype == dtype
        assert (got.float() - expected).norm() <= tolerance * expected.norm()
        assert (got.float() - expected).abs().max() <= 5 * tolerance


@pytest.mark.parametrize("attention", ["full", "mixed"])
def test_padded_steps_read_their_block_tables_with_the_paged_kernel(attention, monkeypatch):
    """The path of CUDA with the kernel interpreted and the graphs called: the portable engine's rollouts, rounded."""
    model = cached_model(attention, torch.float32)
    requests = [
        make_request(make_prompt(length), number=length, member=member, max_new_tokens=2 + 3 * member)
        for length in (5, 126, 150)
        for member in range(2)
    ]
    expected = run(make_engine(model), requests)
    monkeypatch.setattr(kv_cache, "decode_kernel_for", lambda device, dtype: "paged")
    got = {
        r.rollout_id: r
        for r in run(make_engine(model, async_decoding=True, cuda_graphs=True, cache_tokens=640), requests)
    }
    assert len(got) == len(requests)
    for rollout in expected:
        twin = got[rollout.rollout_id]
        assert twin.completion == rollout.completion
        assert (twin.sample_logprobs - rollout.sample_logprobs).abs().max() <= 1e-5
