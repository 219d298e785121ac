"""Decoding from the shards that training holds: the bits of whole weights, by ranks that pass together."""

import dataclasses
import json
import random
import re
import shutil
import time
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from minirl.extras.kernels import paged_attention
from minirl.generation.engine import Engine
from minirl.model import batch_invariance
from minirl.model.config import Adapters
from minirl.model.families import scalar_config
from minirl.model.layers import Linear
from minirl.model.rotation import rope_table
from minirl.model.shards import Shards
from minirl.model.transformer import Transformer, is_batch_invariant, on_meta
from minirl.ranks.process_group import host_group
from minirl.rollouts import RolloutId
from minirl.run import planning, setup
from minirl.training.batch import Batch
from minirl.training.scoring import value_batch
from support.engines import (
    CPU,
    cached_model,
    make_engine,
    make_model,
    make_prompt,
    make_request,
    next_turn,
    score_at,
)
from support.families import make_checkpoint, twin
from support.marks import slow
from support.models import RAW_CONFIG, adamw, make_folder, sharded
from support.pretended_cuda import CUDA, PretendedCuda, plain_decode
from support.resuming import digests
from support.scripts import (
    extended_fork,
    start_script,
    trained,
    untimed,
)

WORLD = torch.distributed.group.WORLD


def sharded_twin(whole: Transformer, rank: int, size: int) -> Transformer:
    """A model with this rank's rows of the layers' weights."""
    model = on_meta(whole.config).to(whole.lm_head.weight.dtype)
    model.shards = Shards(WORLD, host_group(size))
    for layer in model.model.layers.modules():
        if isinstance(layer, Linear):
            layer.shard(model.shards)
    model._apply(lambda tensor: torch.zeros_like(tensor, device=CPU))
    model.tie_weights()
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = weights[name]
            if parameter.shape != weight.shape:
                weight = weight[rank * len(parameter) : (rank + 1) * len(parameter)]
            parameter[: len(weight)].copy_(weight)
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
    """This rank's share of the requests decoded from whole weights, and together; its share of the layers' bytes."""
    model = sharded_twin(whole, rank, size)
    own = a_group_and_others()[rank::size]
    if rank == 1:
        own = own[:1]  # it is done long before the others
    results = []
    for each in (whole, model):
        engine = make_engine(each, **options)
        results.append(decoded(engine.generate(own)))
        engine.sync()
        assert not engine.is_busy
    held, full = (sum(weight.nbytes for weight in m.model.layers.parameters()) for m in (model, whole))
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
        slow("olmo2", torch.bfloat16, 4, {}),  # norms over all heads
        slow("gemma3_text", torch.float32, 2, {}),
        slow("qwen3_5_text", torch.bfloat16, 2, {}),  # gated delta nets, gates of heads
    ],
)
def test_ranks_that_share_layers_decode_the_bits_of_whole_weights(
    request, two_ranks, case, dtype, size, options
):
    """Tokens and logprobs, whatever the features and the other ranks' requests; a rank holds its share of the rows."""
    pool = two_ranks if size == 2 else request.getfixturevalue("four_ranks")
    model = twin(make_checkpoint(case, vocab_size=203)).to(dtype)
    is_exact = is_batch_invariant(model.config, dtype, CPU, size)
    for whole, together, share in pool.run(decode_both_ways, model, size, options):
        assert together == whole or not is_exact
        assert share < 1 / size + 0.1


@pytest.mark.parametrize(("num_columns", "is_exact"), [(24, True), (130, False), (200, True)])
def test_the_start_notices_shards_with_other_bits(monkeypatch, num_columns, is_exact):
    """Of products with fewer than 100 columns: two shards of 130 have 65, those of 24 are padded as the whole is."""

    def linear(x, weight, bias=None):
        exact = (x.double()[:, None] * weight.double()).sum(-1).float()
        return exact + 1e-5 * (len(weight) < 100)

    monkeypatch.setattr(F, "linear", linear)
    batch_invariance.tile_rows.cache_clear()
    shape = (12, num_columns)
    assert batch_invariance.is_batch_invariant([shape], torch.float32, CPU)
    assert batch_invariance.is_batch_invariant([shape], torch.float32, CPU, num_shards=2) == is_exact
    batch_invariance.tile_rows.cache_clear()


def decode_on_a_device(rank):
    """The requests on the host from whole weights, and on a pretended device from shards."""
    whole = make_model("mixed", torch.float32, adapters=Adapters(12, 1.0))
    requests = a_group_and_others()[rank::2]
    expected = decoded(make_engine(whole).generate(requests))
    rope_table.cache_clear()
    with (
        mock.patch.object(paged_attention, "decode", plain_decode),
        PretendedCuda(),
    ):
        model = sharded_twin(whole, rank, 2).to(CUDA)
        options = {"max_running_requests": 16, "cache_tokens": 2048, "dtype": torch.float32, "device": CUDA}
        engine = Engine(model, **options, cuda_graphs=False)
        got = engine.generate(requests)
        engine.sync()
    rope_table.cache_clear()
    return [tokens for tokens, *_ in expected], [rollout.tokens.tolist() for rollout in got]


@pytest.mark.slow
def test_no_tensor_of_the_host_meets_one_of_the_device(two_ranks):
    """Asynchronously, with adapters."""
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
    """For each seed whether this rank's conversations equal those of a whole model with the same calls."""
    whole = cached_model("full", torch.float32)
    options = {"max_running_requests": 4, "cache_tokens": 384, "make_stop_test": Endings}
    model = sharded_twin(whole, rank, 2)
    engine = make_engine(model, room_tokens=0, **options)
    equal = []
    for seed in seeds:
        got = converse(engine, seed + rank)
        engine.sync()
        expected = converse(make_engine(whole, room_tokens=0, **options), seed + rank)
        equal.append(
            got.keys() == expected.keys() and decoded(got.values()) == decoded(expected[i] for i in got)
        )
        assert not engine.is_busy
    return equal


@pytest.mark.slow
def test_ranks_whose_replies_come_at_any_time_wait_for_no_other(two_ranks):
    """Turns with stop tests, a full cache, dropped and preempted requests: each rank has its own order of calls."""
    seeds = [int(time.time() * 1000) % 100_000 + 2 * i for i in range(2)]
    assert two_ranks.run(in_turns, seeds) == [[True] * 2] * 2, seeds


def updates(rank, folder, shard_weights, options):
    """Two updates of three microbatches each, some of them empty: scores, gradients' norms, masters, export."""
    model = sharded(folder, shard_gradients=True, shard_weights=shard_weights, **options)
    optimizer = adamw(model, 0.1)
    found = []
    for step in range(2):
        for i, length in enumerate((20, 31, 12)):
            tokens = (torch.arange(length) * (7 + rank + step)) % 33
            batch = Batch((length,), tokens, loss_mask=torch.arange(length) >= 3)
            if not model.module.config.scalar_head:
                with torch.no_grad():
                    found.append(score_at(model.scorer, batch, 0.9)[0])
                new, entropy = score_at(model.module, batch, 0.9)
                loss = (new * new).sum() + 0.1 * entropy.sum()
            else:
                loss = torch.stack(value_batch(model.module, batch)).square().sum()
            model.backward(loss, is_last=i == 2)
        found.append(model.step(optimizer, lr=0.01, max_grad_norm=1.0))
    masters = {name: master.full_tensor().detach() for name, master in model.masters.items()}
    held = sum(weight.nbytes for name, weight in model.compute_weights.items() if "layers" in name)
    addresses = [parameter.data_ptr() for parameter in model.decoder.parameters()]
    model.refresh()
    assert addresses == [parameter.data_ptr() for parameter in model.decoder.parameters()]
    for name in model._frozen if shard_weights else ():
        if name in model._sliced and len(model.compute_weights[name]) * 2 == len(model._frozen[name]):
            shard = model._frozen[name].to_local()
            assert shard.data_ptr() == model.compute_weights[name].data_ptr(), "one storage"
    whole = model.whole_weights(keep=rank == 1)
    assert bool(whole) == (rank == 1)
    return found, masters, whole, held


ADAPTERS = Adapters(rank=3, alpha=6.0)


def is_first_layer(name):
    return "layers.0" in name


@pytest.mark.parametrize(
    "options",
    [
        {},
        slow({"recompute_layers": True}),
        slow({"dtype": torch.bfloat16, "offload_optimizer": True}),
        slow({"is_frozen": is_first_layer}),
        slow({"adapters": ADAPTERS}),
        slow({"adapters": ADAPTERS, "offload_optimizer": True, "dtype": torch.bfloat16}),
        slow({"scalar_head": True}),
    ],
    ids=["tied", "untied_recomputed", "bf16_offloaded", "frozen", "adapters", "adapters_offloaded", "value"],
)
def test_updates_from_gathered_layers_have_the_bits_of_whole_weights(two_ranks, tmp_path, options):
    """Scores, norms, masters and the export; the weights that decode are this rank's share, in place."""
    is_tied = "recompute_layers" not in options
    raw = {**RAW_CONFIG, "hidden_size": 64, "tie_word_embeddings": is_tied}
    folder = make_folder(tmp_path / "folder", scalar_config(raw) if "scalar_head" in options else raw)
    results = [two_ranks.run(updates, folder, shard, options) for shard in (False, True)]
    for (found, masters, _, held), (same_found, same_masters, _, share) in zip(*results, strict=True):
        for value, same in zip(found, same_found, strict=True):
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(same))
        assert masters.keys() == same_masters.keys()
        assert all(torch.equal(masters[name], same_masters[name]) for name in masters)
        assert share < 0.6 * held
    exported, same_export = (result[1][2] for result in results)
    assert list(exported) == list(same_export)
    assert all(torch.equal(exported[name], same_export[name]) for name in exported)


COMMON = "--num-steps 2 --save-every 1 --keep-checkpoints 0 --prompts-per-step 4 --group-size 3"
COMMON += " --max-new-tokens 10"
WORKERS = "--data {rows} --eval-data {rows} --rollout {functions}:calculate"
WORKERS += " --reward {functions}:right {functions}:sevenths"
RUNS = {
    "kl": ("train_grpo.py", "--kl-coef 0.05 --num-epochs 2 --num-minibatches 2"),
    "ppo": ("train_ppo.py", "--kl-reward-coef 0.05"),
    "lora": ("train_grpo.py", "--kl-coef 0.05 --lora-rank 3 --algorithm remax --offload-optimizer"),
    "ppo_lora": ("train_ppo.py", "--lora-rank 3 --recompute-layers on"),
    "partial": ("train_grpo.py", "--max-staleness 2 --dynamic-sampling --num-steps 4"),
    "teacher": ("train_grpo.py", "--teacher {teacher}"),
    "workers": ("train_grpo.py", WORKERS),
    "workers_partial": ("train_grpo.py", WORKERS + " --max-staleness 1 --num-steps 3"),
}
FUNCTIONS = """
async def calculate(episode):
    turn = await episode.generate(max_tokens=4)
    for _ in range(episode.seed % 3):
        turn = await episode.generate(after="7 ", max_tokens=3, stop=["1"])
    if episode.seed % 2:
        await episode.branch(episode.prompt).generate(max_tokens=len(turn.ids))


def right(completions, answer):
    return [float(len(completion) % 3) for completion in completions]


def sevenths(completions):
    return [len(completion) % 7 / 7 for completion in completions]
"""
TIMED = ("perf/",)  # of groups there are fewer engines, with larger batches


def untimed_digests(folder):
    """`digests` without each rank's shards and records, which others hold, and without the engines' rates."""
    found = {name: digest for name, digest in digests(folder).items() if "/resume/" not in name}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        kept = {name: value for name, value in untimed(line).items() if not name.startswith(TIMED)}
        found[f"metrics {line['step']}"] = json.dumps(kept, sort_keys=True)
    return found


def sharding_gradients():
    """As a run does whose gradients do not fit whole: ranks that decode together always shard them."""

    def plan(*args, **options):
        sizes, needed = planning.plan(*args, **options)
        return dataclasses.replace(sizes, shard_gradients=True), needed

    return mock.patch.object(setup, "plan", plan)


def command(case, *more, **values):
    """Script and flags of a run."""
    script, flags = RUNS[case]
    return script, COMMON, flags.format(**values), *more


def run_of(pool, case, mode, runs, **values):
    """The folder of a run, which several tests read."""
    flags = command(case, MODES[mode], **values)
    return trained(pool, runs / f"{case}{pool.num_ranks}-{mode}", *flags, under=sharding_gradients)


@pytest.fixture(scope="module")
def values(tmp_path_factory, embedded_model):
    """What flags of `RUNS` name."""
    folder = tmp_path_factory.mktemp("values")
    (folder / "functions.py").write_text(FUNCTIONS)
    rows = [{"prompt": f"{n} 4 2 1", "answer": "1"} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"rows": folder / "rows.jsonl", "functions": folder / "functions.py", "teacher": embedded_model}


MODES = {"on": "--decode-group 2", "off": "--decode-group 1"}


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        ("kl", 2),
        slow("ppo", 2),
        slow("lora", 2),
        slow("ppo_lora", 2),
        slow("partial", 2),
        slow("teacher", 2),
        slow("workers", 2),
    ],
)
def test_a_run_that_decodes_from_shards_is_the_run_with_whole_weights(
    request, two_ranks, runs, values, case, num_ranks
):
    """Rollouts' files, checkpoints and metrics: byte for byte."""
    pool = two_ranks if num_ranks == 2 else request.getfixturevalue("four_ranks")
    folders = [run_of(pool, case, mode, runs, **values) for mode in MODES]
    in_slices, whole = map(untimed_digests, folders)
    assert in_slices == whole, sorted(name for name in whole if in_slices.get(name) != whole[name])


KILLED = """
import os
from minirl.model.shards import Shards
from minirl.ranks.process_group import rank

join = Shards.join


def join_and_die(shards, num_rows, *, has_tokens):
    if rank() == 1 and has_tokens:
        os.kill(os.getpid(), 9)
    return join(shards, num_rows, has_tokens=has_tokens)


Shards.join = join_and_die
"""
HANGS = KILLED.replace("import os", "import time").replace("os.kill(os.getpid(), 9)", "time.sleep(300)")


@pytest.mark.slow
@pytest.mark.parametrize("function", [KILLED, HANGS], ids=["a_killed_rank", "a_rank_that_hangs"])
def test_row_37_a_rank_ends_with_one_that_shares_its_layers(tmp_path, runs, function):
    """It names the other, which reports nothing."""
    script = extended_fork(tmp_path, "train_grpo.py", function, name=f"fork{len(function)}")
    flags = "--num-steps 1 --prompts-per-step 2 --group-size 2 --run-name shares --hang-timeout 8"
    job = start_script(script, MODES["on"], flags, runs=runs)
    try:
        assert job.processes[0].wait(120) == 1
        assert re.search(r"error: rank 1 \(.*\) has ended, hangs", job.output(0))
        assert "Traceback" not in job.output(0)
        assert "error: " not in job.output(1)
    finally:
        job.kill()
        shutil.rmtree(runs / "shares", ignore_errors=True)
