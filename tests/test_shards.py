"""Decoding from training's shards gives the same bits as decoding from full weights."""

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from minirl.model import batch_invariance
from minirl.model.config import Adapters
from minirl.model.shards import shard_layers
from minirl.model.transformer import Transformer, is_batch_invariant, make_meta_model
from minirl.run import planning, setup
from support.engines import CPU, make_engine, mixed_requests
from support.families import make_checkpoint, twin
from support.marks import slow
from support.models import RAW_CONFIG, make_folder, sharded
from support.resuming import digests
from support.scripts import (
    read_metrics,
    trained,
    untimed,
    write_rows,
)


def sharded_twin(whole: Transformer, rank: int) -> Transformer:
    """Return a model with this rank's rows of the layers' weights."""
    model = make_meta_model(whole.config)
    model.shard_group = shard_layers(model.layers, whole.config.adapters)
    model.to(whole.lm_head.weight.dtype)
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


def decoded(rollouts):
    """Return what must be equal: tokens, logprobs and finish reasons."""
    return [(r.tokens.tolist(), r.stream["logprob"].tolist(), r.finish_reason) for r in rollouts]


def decode_both_ways(rank, whole, size, options):
    """Decode this rank's requests from full weights and from shards; return both, and the shard's size fraction."""
    model = sharded_twin(whole, rank)
    requests = mixed_requests()
    query_lengths = len(requests) // size
    # Rank 1 is done long before the others.
    own = requests[rank * query_lengths :][: 1 if rank == 1 else query_lengths]
    results = []
    for each in (whole, model):
        engine = make_engine(each, **options)
        results.append(decoded(engine.generate(own)))
        engine.sync_ranks()
        assert not engine.is_busy
    held, full = (sum(weight.nbytes for weight in m.layers.parameters()) for m in (model, whole))
    return *results, held / full


SMALL_CACHE = {"max_running_requests": 5, "cache_tokens": 640}
PADDED = {"async_decoding": True, "cuda_graphs": True}


@pytest.mark.parametrize(
    ("case", "dtype", "size", "options"),
    [
        ("llama_biases", torch.float32, 2, {}),  # an MLP width of 131, which does not divide evenly
        slow("smollm3_window", torch.float32, 2, {}),
        slow("qwen2", torch.bfloat16, 2, PADDED),
        slow("llama", torch.float32, 2, SMALL_CACHE),
        slow("llama_tied_mha", torch.float32, 4, PADDED),
        slow("llama_head_dim", torch.float32, 2, {}),  # 8 key columns on each rank
        slow("olmo2", torch.bfloat16, 4, {}),  # norms over all heads
        slow("gemma3_text", torch.float32, 2, {}),
        slow("qwen3_5_text", torch.bfloat16, 2, {}),  # Gated DeltaNet, gates of heads
    ],
)
def test_ranks_that_share_layers_decode_the_bits_of_whole_weights(
    request, two_ranks, case, dtype, size, options
):
    """Tokens and logprobs are equal, whatever the features and other ranks' requests; a rank holds only its rows."""
    pool = two_ranks if size == 2 else request.getfixturevalue("four_ranks")
    model = twin(make_checkpoint(case, vocab_size=203)).to(dtype)
    is_exact = is_batch_invariant(model.config, dtype, CPU, size)
    for whole, together, share in pool.run(decode_both_ways, model, size, options):
        assert together == whole or not is_exact
        assert share < 1 / size + 0.1


@pytest.mark.parametrize(("num_columns", "is_exact"), [(24, True), (130, False), (200, True)])
def test_the_start_notices_shards_with_other_bits(monkeypatch, num_columns, is_exact):
    """Matmuls with fewer than 100 columns are inexact here, so 130 columns in two shards of 65 are inexact."""

    def linear(x, weight, bias=None):
        exact = (x.double()[:, None] * weight.double()).sum(-1).float()
        return exact + 1e-5 * (len(weight) < 100)

    monkeypatch.setattr(F, "linear", linear)
    monkeypatch.setattr(batch_invariance, "_measurements", {})
    shape = (12, num_columns)
    assert batch_invariance.is_batch_invariant([shape], torch.float32, CPU)
    assert batch_invariance.is_batch_invariant([shape], torch.float32, CPU, num_shards=2) == is_exact


def weights_held(rank, folder, options):
    """Return the bytes of the layers' decode weights with and without shards; check that addresses stay."""
    models = [
        sharded(folder, shard_gradients=True, shard_weights=shard, **options) for shard in (True, False)
    ]
    model = models[0]
    addresses = [parameter.data_ptr() for parameter in model.decoder.parameters()]
    model.refresh_compute_weights()
    assert addresses == [parameter.data_ptr() for parameter in model.decoder.parameters()]
    for name, shard in model._frozen.items():
        weight = model.compute_weights[name]
        if 2 * len(weight) == len(shard):
            assert shard.to_local().data_ptr() == weight.data_ptr(), "two storages"
    return [
        sum(weight.nbytes for name, weight in each.compute_weights.items() if "layers" in name)
        for each in models
    ]


@pytest.mark.parametrize(
    "options", [{}, slow({"adapters": Adapters(rank=3, alpha=6.0)})], ids=["", "adapters"]
)
def test_a_rank_holds_its_share_of_the_weights_once(two_ranks, tmp_path, options):
    """Decode weights are refreshed in place; a frozen decode weight is the shard itself."""
    folder = make_folder(tmp_path / "folder", {**RAW_CONFIG, "hidden_size": 64})
    for held, whole in two_ranks.run(weights_held, folder, options):
        assert held < 0.6 * whole


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
TIMED = ("perf/",)  # rates depend on how ranks decode


def untimed_digests(folder):
    """Return `digests` without the ranks' resume files and without the engines' rates."""
    found = {name: digest for name, digest in digests(folder).items() if "/resume/" not in name}
    for line in read_metrics(folder):
        kept = {name: value for name, value in untimed(line).items() if not name.startswith(TIMED)}
        found[f"metrics {line['step']}"] = json.dumps(kept, sort_keys=True)
    return found


def sharding_gradients():
    """Shard gradients in both runs, because ranks that decode together always shard gradients."""

    def plan(*args, **options):
        needed = planning.plan(*args, **options)
        return replace(needed, sizes=replace(needed.sizes, shard_gradients=True))

    return mock.patch.object(setup, "plan", plan)


@pytest.fixture(scope="module")
def values(tmp_path_factory, embedded_model):
    """Return the values for placeholders in the flags of `RUNS`."""
    folder = tmp_path_factory.mktemp("values")
    (folder / "functions.py").write_text(FUNCTIONS)
    rows = write_rows(folder / "rows.jsonl", [{"prompt": f"{n} 4 2 1", "answer": "1"} for n in range(8)])
    return {"rows": rows, "functions": folder / "functions.py", "teacher": embedded_model}


@pytest.mark.parametrize("case", [case if case == "kl" else slow(case) for case in RUNS])
def test_a_run_that_decodes_from_shards_is_the_run_with_whole_weights(two_ranks, runs, values, case):
    """Rollout files, checkpoints and metrics are equal byte for byte."""
    script, flags = RUNS[case]
    found = []
    for mode in ("on", "off"):
        folder = trained(
            two_ranks,
            runs / f"shards-{case}-{mode}",
            script,
            COMMON,
            flags.format(**values),
            f"--shard-weights {mode}",
            under=sharding_gradients,
        )
        assert all(("time/decode_comm" in line) == (mode == "on") for line in read_metrics(folder))
        found.append(untimed_digests(folder))
    in_slices, whole = found
    assert in_slices == whole, sorted(name for name in whole if in_slices.get(name) != whole[name])
