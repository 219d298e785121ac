"""Decoding from the shards that training holds: the bits of whole weights, by ranks that follow a leader."""

import dataclasses
import random
import re
import shutil
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from minirl.generation.engine import Engine
from minirl.generation.group_engine import GroupEngine
from minirl.kernels import paged_attention
from minirl.model import batch_invariance, device_kernels
from minirl.model.config import LINEAR_LAYERS, Adapters
from minirl.model.rotation import rope_table
from minirl.model.sliced_model import slice_model
from minirl.model.slices import Slices
from minirl.model.transformer import Transformer, is_batch_invariant, on_meta
from minirl.ranks.process_group import host_group
from minirl.rewards.reward_workers import load_reward
from minirl.rollouts import RolloutId
from support.engines import (
    CPU,
    cached_model,
    make_engine,
    make_model,
    make_prompt,
    make_request,
    next_turn,
)
from support.families import make_checkpoint, twin
from support.jobs import ROOT
from support.marks import slow
from support.pretended_cuda import CUDA, PretendedCuda, plain_decode
from support.scripts import (
    extended_fork,
    start_script,
)

WORLD = torch.distributed.group.WORLD


def sliced(whole: Transformer, slices: Slices) -> Transformer:
    """This rank's slice of a model."""
    model = on_meta(whole.config).to(whole.lm_head.weight.dtype)
    names = slice_model(model, slices)
    model._apply(lambda tensor: torch.zeros_like(tensor, device=CPU))
    model.tie_weights()
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = weights[name]
            own = weight[slices.own(len(weight))] if name in names else weight
            parameter[: len(own)].copy_(own)
    return model


def a_group_and_others():
    """A group, a greedy request, and prompts around the border of a cache block."""
    group = [make_request(make_prompt(20), member=member) for member in range(3)]
    lengths = enumerate((1, 117, 127, 128, 150), start=1)
    others = [make_request(make_prompt(n), number=i, temperature=0.7, max_new_tokens=12) for i, n in lengths]
    return [*group, make_request(make_prompt(9), number=9, temperature=0.0), *others]


def decoded(rollouts):
    """What must be equal of rollouts: tokens, the bits of logprobs, reasons."""
    return [(r.tokens.tolist(), r.sample_logprobs.tolist(), r.finish_reason) for r in rollouts]


def decode_both_ways(rank, whole, size, options):
    """The requests decoded from whole weights, and from slices; the share of the bytes that a rank holds."""
    model = sliced(whole, Slices(rank, size, WORLD))
    results = [decoded(make_engine(m, **options).generate(a_group_and_others())) for m in (whole, model)]
    held, full = (sum(parameter.nbytes for parameter in m.parameters()) for m in (model, whole))
    return *results, held / full


SMALL_CACHE = {"max_running_requests": 5, "cache_tokens": 640}
PADDED = {"async_decoding": True, "cuda_graphs": True}


@pytest.mark.parametrize(
    ("case", "dtype", "size", "options"),
    [
        # tied, with biases, and a vocabulary and an MLP that do not divide
        ("smollm3_window", torch.float32, 2, {}),
        slow("qwen2", torch.bfloat16, 2, PADDED),
        slow("llama", torch.float32, 2, SMALL_CACHE),
        slow("llama_tied_mha", torch.float32, 4, PADDED),
        slow("llama_head_dim", torch.float32, 2, {}),  # 8 key columns on each rank
        slow("phi3", torch.float32, 2, {}),  # fused projections: heads are taken of the gathered ones
        slow("olmo2", torch.bfloat16, 4, {}),  # norms over all heads
        slow("gemma3_text", torch.float32, 2, {}),
        slow("qwen3_5_text", torch.bfloat16, 2, {}),  # gated delta nets, whole on each rank; gates of heads
        slow("arcee", torch.float32, 2, SMALL_CACHE),  # an MLP without gate
    ],
)
def test_slices_decode_the_bits_of_whole_weights(request, two_ranks, case, dtype, size, options):
    """Tokens and logprobs, whatever the features; a rank holds its share of the bytes, and all norms."""
    pool = two_ranks if size == 2 else request.getfixturevalue("four_ranks")
    model = twin(make_checkpoint(case, vocab_size=203)).to(dtype)
    is_exact = is_batch_invariant(model.config, dtype, CPU, size)
    for whole, in_slices, share in pool.run(decode_both_ways, model, size, options):
        assert in_slices == whole or not is_exact
        assert share < 1 / size + 0.05


@pytest.mark.parametrize(("num_columns", "is_exact"), [(24, True), (130, False), (200, True)])
def test_the_start_notices_slices_with_other_bits(monkeypatch, num_columns, is_exact):
    """Of products with fewer than 100 columns: two slices of 130 have 65, those of 24 are padded as the whole is."""

    def linear(x, weight, bias=None):
        exact = (x.double()[:, None] * weight.double()).sum(-1).float()
        return exact + 1e-5 * (len(weight) < 100)

    monkeypatch.setattr(F, "linear", linear)
    batch_invariance.tile_rows.cache_clear()
    shape = (12, num_columns)
    assert batch_invariance.is_batch_invariant([shape], torch.float32, CPU)
    assert batch_invariance.is_batch_invariant([shape], torch.float32, CPU, num_slices=2) == is_exact
    batch_invariance.tile_rows.cache_clear()


@pytest.mark.parametrize("width", [1, 2, 5, 11])
def test_a_narrow_chunk_of_the_vocabulary_has_the_bits_of_a_wide_product(width):
    """The last of 2,048-token chunks may be narrow in training, where a slice has the same tokens in a wide product."""
    if not batch_invariance.is_batch_invariant(
        [(64, 2048 + width)], torch.float32, CPU, is_head=True, num_slices=2
    ):
        pytest.skip("this machine's matrix library gives columns other bits beside others")
    generator = torch.Generator().manual_seed(1)
    hidden, head = (torch.randn(n, 64, generator=generator) for n in (40, 2048 + width))
    whole = batch_invariance.head_logits(hidden, head)
    assert torch.equal(batch_invariance.head_logits(hidden, head[2048:]), whole[:, 2048:])


def decode_on_a_device(rank):
    """The requests on the host from whole weights, and on a pretended device from slices."""
    whole = make_model("mixed", torch.float32, adapters=Adapters(12, 1.0, LINEAR_LAYERS))
    expected = decoded(make_engine(whole).generate(a_group_and_others()))
    rope_table.cache_clear()
    with (
        mock.patch.object(paged_attention, "decode", plain_decode),
        mock.patch.object(device_kernels, "are_used", return_value=False),
        PretendedCuda(),
    ):
        model = sliced(whole, Slices(rank, 2, WORLD)).to(CUDA)
        options = {"max_running_requests": 16, "cache_tokens": 2048, "dtype": torch.float32, "device": CUDA}
        got = Engine(model, **options).generate(a_group_and_others())
    rope_table.cache_clear()
    return [tokens for tokens, *_ in expected], [rollout.tokens.tolist() for rollout in got]


@pytest.mark.slow
def test_no_tensor_of_the_host_meets_one_of_the_device(two_ranks):
    """Asynchronously, in the buffers of graphs, with adapters; the sampled tokens are broadcast."""
    for expected, got in two_ranks.run(decode_on_a_device):
        assert got == expected


class Endings:
    """A stop test that ends turns at multiples of a number."""

    max_tokens = 1

    def __init__(self, strings):
        self.divisor = int(strings[0])

    def __call__(self, turns):
        return [ids[-1] % self.divisor == 0 for ids in turns]


def converse(engine, seed):
    """Episodes of three turns whose replies come late, in an order that the seed says; their tokens and logprobs."""
    rng = random.Random(seed)
    stops = [(), ("5",)]
    requests = [
        dataclasses.replace(make_request(make_prompt(3 + n), number=n, max_new_tokens=9), holds=True)
        for n in range(9)
    ]
    late: list[RolloutId] = []
    num_turns: dict[RolloutId, int] = {}
    rollouts = {}
    begun = {request.rollout_id: request for request in requests}
    while requests or engine.is_busy:
        if requests and rng.random() < 0.5:
            engine.submit([dataclasses.replace(requests.pop(), stop=rng.choice(stops))], weight_version=seed)
        for rollout in engine.step():
            rollouts[rollout.rollout_id] = rollout
            late.append(rollout.rollout_id)
        rng.shuffle(late)
        while late and rng.random() < 0.4:
            rollout_id = late.pop()
            num_turns[rollout_id] = num_turns.get(rollout_id, 0) + 1
            if num_turns[rollout_id] == 3:
                engine.release(rollout_id)
                continue
            stop = stops[len(late) % 2]
            engine.submit(
                [next_turn(begun[rollout_id], rollouts[rollout_id], [1, 2, 5], 6, stop=stop)],
                weight_version=seed,
            )
    return rollouts


def in_turns(rank, seeds):
    """For each seed whether the leader's conversations equal those of a whole model with the same calls."""
    whole = cached_model("full", torch.float32)
    group = host_group(2)
    options = {"max_running_requests": 4, "cache_tokens": 384, "make_stop_test": Endings}
    model = sliced(whole, Slices(rank, 2, WORLD))
    engine = GroupEngine(model, group=group, room_tokens=0, dtype=torch.float32, device=CPU, **options)
    equal = []
    for seed in seeds:
        if rank == 0:
            got = converse(engine, seed)
            expected = converse(make_engine(whole, **options), seed)
            equal.append(
                got.keys() == expected.keys() and decoded(got.values()) == decoded(expected[i] for i in got)
            )
        engine.sync()
        stats = engine.take_stats()
        assert (stats.decode_tokens > 0) == (rank == 0), "work is counted once"
        assert not engine.is_busy
        assert engine._cache is None, "followers give their memory back too"
    return equal


def test_the_workers_of_a_group_are_the_leaders(tmp_path):
    """A pool gets more that have loaded the code, or none."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    reward = load_reward(f"{tmp_path}/functions.py:right", num_workers=1)
    reward.pool.resize(3)
    assert [worker.is_ready for worker in reward.pool.workers] == [True] * 3
    assert reward(completions=["ab"], answer=["1"]) == [2.0]
    reward.pool.resize(0)
    assert reward.pool.workers == []


FAILS = """
async def fails(episode):
    await episode.generate(max_tokens=3)
    raise ValueError('no such tool')
"""
KILLED = """
import os
from minirl.generation.engine import Engine
from minirl.generation.group_engine import GroupEngine
from minirl.ranks.process_group import rank

receive = GroupEngine._receive


def receive_and_die(engine):
    if engine.stats.decode_steps == 3:
        os.kill(os.getpid(), 9)
    return receive(engine)


GroupEngine._receive = receive_and_die
"""
HANGS = KILLED.replace("import os", "import time").replace("os.kill(os.getpid(), 9)", "time.sleep(300)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        (FAILS, 4, "(?s)error: rollout fails for the row at .*no such tool"),
        (KILLED, 1, r"error: rank 1 \(.*\) has ended, hangs"),
        (HANGS, 1, r"error: rank 1 \(.*\) has ended, hangs"),
    ],
    ids=["a_function_that_fails", "a_killed_follower", "a_follower_that_hangs"],
)
def test_row_37_a_leader_ends_with_its_function_or_its_follower(tmp_path, runs, function, code, message):
    """Its error is the only one."""
    script = ROOT / "train_grpo.py"
    flags = ["--num-steps 1 --prompts-per-step 2 --group-size 2 --run-name leads --hang-timeout 8"]
    if function is FAILS:
        (tmp_path / "functions.py").write_text(function)
        flags.append(f"--rollout {tmp_path}/functions.py:fails")
    else:
        script = extended_fork(tmp_path, script.name, function, name=f"fork{len(function)}")
    job = start_script(script, MODES["on"], *flags, runs=runs)
    try:
        assert job.processes[0].wait(120) == code
        assert re.search(message, job.output(0))
        assert job.output(0).count("Traceback") == (function is FAILS)  # the function's
        assert "error: " not in job.output(1)
    finally:
        job.kill()
        shutil.rmtree(runs / "leads", ignore_errors=True)
