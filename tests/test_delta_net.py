"""Gated DeltaNet: states of packed, shared and cached sequences."""

from dataclasses import replace

import pytest
import torch

from minirl.model.attention import PackedLayout, Sequence
from minirl.model.transformer import is_batch_invariant
from minirl.training.batch import pack
from support.engines import (
    CPU,
    cached_model,
    finish,
    hidden_states,
    make_engine,
    make_prompt,
    make_request,
    mixed_requests,
    scores_of,
)
from support.marks import slow

# Lengths around the borders of 32-token chunks; some parents share a prefix with another sequence themselves.
SEQUENCES = (
    Sequence(64),
    Sequence(200),
    Sequence(130, 1, 128),
    Sequence(70, 2, 65),
    Sequence(128, 1, 64),
    Sequence(129, 4, 127),
    Sequence(63, 1, 1),
    Sequence(300, 1, 199),
)


def tokens_of(sequences):
    """Return random tokens for each sequence, which begins like its parent."""
    generator = torch.Generator().manual_seed(0)
    tokens = []
    for length, parent, num_shared_tokens in sequences:
        own = torch.randint(48, (length,), generator=generator)
        tokens.append(
            own
            if parent is None
            else torch.cat([tokens[parent][:num_shared_tokens], own[num_shared_tokens:]])
        )
    return tokens


def test_sequences_that_share_their_beginning_have_the_bits_and_gradients_of_each_alone():
    """This includes a parent that shares its beginning with another sequence. Pitfall 65."""
    model = cached_model("states", torch.float32)
    is_exact = is_batch_invariant(model.config, torch.float32, CPU)
    sequences = tokens_of(SEQUENCES)
    layout = PackedLayout(SEQUENCES, CPU)
    tokens = torch.cat(sequences)[layout.computed_tokens]
    packed = model(tokens, layout.positions, layout)[layout.hidden_index]
    gradients = []
    for outputs in (packed, torch.cat([hidden_states(model, sequence) for sequence in sequences])):
        assert torch.equal(outputs, packed) if is_exact else torch.allclose(outputs, packed, atol=1e-5)
        loss = (outputs * torch.linspace(-1, 1, outputs.shape[1])).square().sum()
        gradients.append(torch.autograd.grad(loss, model.parameters(), allow_unused=True))
    for got, expected in zip(*gradients, strict=True):
        assert expected is None or (got - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
def test_a_reused_slot_holds_nothing_of_the_sequence_before(dtype):
    """Unused slots are filled with NaN, so a prefill must write its whole slot. Logprobs equal training's.

    Pitfalls 65 and 66.
    """
    model = cached_model("states", dtype)
    expected = make_engine(model).generate(mixed_requests())
    # Before the skip: the probe decodes with the same states, so an error in the states would look like an inexact
    # machine.
    for rollout in expected:
        assert torch.allclose(scores_of(model, [rollout]), pack([rollout]).sample_logprobs, atol=0.1)
    if not is_batch_invariant(model.config, dtype, CPU):
        pytest.skip("this machine's matmuls are not batch-invariant")
    engine = make_engine(model, max_running_requests=3, keeps_cache=True)
    engine.submit(mixed_requests())
    rollouts = {}
    while engine.is_busy:
        cache = engine._cache
        free = (cache.blocks.lengths[: engine.max_running_requests + 1] == 0).nonzero()[0]
        for layer in model.config.delta_net.layers:
            for pool in cache.pool.recurrent_states.layers[layer]:
                pool[free] = torch.nan
        rollouts |= {rollout.rollout_id: rollout for rollout in engine.step()}
    for rollout in expected:
        sampled = pack([rollouts[rollout.rollout_id]]).sample_logprobs
        assert torch.equal(sampled, pack([rollout]).sample_logprobs)
        assert torch.equal(scores_of(model, [rollout]), sampled)


def test_requests_between_turns_give_up_their_slots_where_none_would_run():
    """Otherwise, new requests would wait for parked requests, whose replies wait for the new requests."""
    engine = make_engine(cached_model("states", torch.float32), max_running_requests=2)
    requests = [
        make_request(make_prompt(5), number=i, stop_ids=frozenset(), max_new_tokens=4) for i in range(4)
    ]
    requests[:2] = [replace(request, parks_after_turn=True) for request in requests[:2]]
    engine.submit(requests)
    finish(engine, 4)
    assert engine.stats.evictions >= 1
