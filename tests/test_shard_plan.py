"""The plan of runs that decode from shards: bytes by hand for large models, and which ranks decode together."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from minirl.errors import InputError
from minirl.model.config import LINEAR_LAYERS, Adapters, ModelConfig
from minirl.model.families import config_from_dict
from minirl.model.layers import Linear
from minirl.model.sliced_model import slice_model
from minirl.model.slices import Slices
from minirl.model.transformer import on_meta
from minirl.plan import choice, formulas, needs
from minirl.plan.workload import Sizes, Workload
from minirl.run.config import RunConfig
from minirl.run.planning import possible_decode_groups
from support import memory, models
from support.families import PUBLISHED
from support.memory import formula

ROOT = Path(__file__).parent.parent
QWEN_7B, QWEN_14B, QWEN_32B, LLAMA_70B = (
    config_from_dict(raw) for raw in (models.QWEN_7B, models.QWEN_14B, models.QWEN_32B, models.LLAMA_70B)
)
LORA = Adapters(16, 16.0, LINEAR_LAYERS)
GB = 1e9


def make_workload(policy: ModelConfig, *, num_ranks: int, kl: bool = False, **changes: Any) -> Workload:
    """Of GRPO on GPUs of one node that decode together: 16 x 8 completions of 4,096 tokens, prompts of 300."""
    on_node = {
        "frozen": {"reference": policy} if kl and policy.adapters is None else {},
        "dtype": torch.bfloat16,
        "device_type": "cuda",
        "decode_group": num_ranks,
        "longest": 4396,
        "requests": 144,
        "update_tokens": 128 // num_ranks * 4396,
    }
    return memory.make_workload(policy, num_ranks=num_ranks, **on_node | changes)


def planned(work: Workload, free: float) -> tuple[Sizes, str | None]:
    """The sizes that are chosen, and why they do not fit."""
    given = dict.fromkeys(Sizes.__dataclass_fields__, "auto") | {"decode_group": work.decode_group}
    if work.shards_weights:
        given["shard_gradients"] = True
    sizes = choice.choose_sizes(work, free, given)
    return sizes, choice.too_large(work, sizes, free)


def total(parts: dict[str, float]) -> float:
    return sum(parts.values())


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kl", [False, True])
def test_32b_on_8_cards_of_80_gb_fits_with_the_optimizer_on_the_host(kl, offload):
    """With 4,096 new tokens, with and without a reference, by hand from P and a layer's U. Whole weights never fit."""
    layer = 2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 27648 + (5120 + 2 * 1024) + 2 * 5120
    outside = 2 * 152064 * 5120 + 5120
    assert formulas.layer_parameters(QWEN_32B) == layer
    assert formulas.num_parameters(QWEN_32B) == 64 * layer + outside
    parameters = 64 * layer + outside
    eighth = parameters / 8
    rows = 2 * eighth  # 8.19 GB to decode from
    reference = (kl and not offload) * 2 * eighth
    masters_and_moments = (not offload) * 12 * eighth  # 49.1 GB
    gradients = (not offload) * 4 * eighth  # 16.4 GB
    gathered = 2 * (outside + 2 * layer)  # 5.1 GB: embedding and head, and two layers
    # When the activations are gone, the gradients of embedding and head, in bf16 and in fp32: 9.3 GB.
    sums = (2 + 4) * outside

    work = make_workload(QWEN_32B, num_ranks=8, kl=kl, offloads_optimizer=offload)
    rope = 8 * 32768 * 128
    always = total(needs.always_bytes(work))
    assert always == pytest.approx(rows + reference + masters_and_moments + rope)
    least = Sizes(1, 4396, 4396, recompute_layers=True, shard_gradients=True)
    phases = needs.phase_bytes(work, least)
    assert total(phases["update"]) == pytest.approx(gradients + gathered + sums)
    # Of the cache a rank has the keys and values of one head in 64 layers: 32 KB of a token.
    assert phases["generate"]["cache"] == 2 * 2 * 64 * 128 * 4396

    sizes, refusal = planned(work, 80 * GB)
    assert (refusal is None) == offload
    if offload:
        assert sizes.max_tokens_per_microbatch >= 8192
        assert sizes.cache_tokens == 144 * (4396 + 256)  # all completions of the group at once
        on_host = total(needs.host_bytes(work, num_ranks=8)) / GB
        assert on_host == pytest.approx(1312 if kl else 1194, abs=2)  # 118 GB of a reference
    else:
        # 88 GB, and 96 with the reference, of the 72 that can be used: cards of 141 GB hold both.
        needed = rows + reference + masters_and_moments + rope + gradients + gathered + sums
        assert needed / GB == pytest.approx(96.4 if kl else 88.2, abs=0.1)
        assert "--offload-optimizer" in refusal
        assert planned(work, 141 * GB)[1] is None
    whole = dataclasses.replace(work, decode_group=1)
    assert planned(whole, 80 * GB)[1]


@pytest.mark.parametrize("offload", [False, True])
def test_14b_on_4_cards_of_24_gb_fits_with_adapters(offload):
    """The reference is the policy without them. By hand, of 21.6 GB: 2 P / 4 = 7.4, and 4.2 are gathered."""
    adapted = dataclasses.replace(QWEN_14B, adapters=LORA)
    work = make_workload(adapted, num_ranks=4, kl=True, offloads_optimizer=offload)
    layer = 2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 13824 + (5120 + 2 * 1024) + 2 * 5120
    outside = 2 * 152064 * 5120 + 5120
    # Of rank 16 on every layer's queries, keys, values, output, gate, up and down.
    adapters = 48 * 16 * (2 * (5120 + 5120) + 2 * (5120 + 1024) + 3 * (5120 + 13824))
    parameters = 48 * layer + outside + adapters
    always = needs.always_bytes(work)
    first_matrices = 48 * 16 * (6 * 5120 + 13824)  # of the adapters, which each rank has whole
    assert always["weights"] == 2 * ((parameters - first_matrices) / 4 + first_matrices)
    assert always.get("masters and moments", 0) == (not offload) * 12 * adapters / 4
    gathered = 2 * (outside + 2 * (layer + adapters / 48))
    sizes, refusal = planned(work, 24 * GB)
    assert refusal is None
    assert needs.phase_bytes(work, sizes)["update"]["gathered weights"] == pytest.approx(gathered, rel=1e-6)
    assert sizes.max_tokens_per_microbatch >= 8192
    assert sizes.cache_tokens >= 32 * (4396 + 256)
    assert planned(dataclasses.replace(work, decode_group=1), 24 * GB)[1].startswith("the models need 29.")
    # With the optimizer on the host the shards under the adapters are there too, besides the rows on the device.
    on_host = needs.host_bytes(work, num_ranks=4).get("frozen shards", 0)
    assert on_host == (offload and 4 * formulas.pinned_bytes(adapted, 2, num_shards=4))


def test_70b_on_8_cards_of_80_gb_needs_a_host_of_2_tb_or_adapters():
    """By hand, P = 70.55e9: 12 P / 8 = 105.8 GB of masters and moments fit no card; rows are 17.6 GB."""
    parameters = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192) + 2 * 128256 * 8192 + 8192
    assert formulas.num_parameters(LLAMA_70B) == parameters
    work = make_workload(LLAMA_70B, num_ranks=8, kl=True)
    assert needs.always_bytes(work)["masters and moments"] == 12 * parameters / 8
    refusal = planned(work, 80 * GB)[1]
    assert refusal.startswith("the models need 141 GB of the 72 GB")
    assert "--offload-optimizer" in refusal

    offloaded = dataclasses.replace(work, offloads_optimizer=True)
    rope = 8 * 32768 * 128
    assert total(needs.always_bytes(offloaded)) == 2 * parameters / 8 + rope
    sizes, refusal = planned(offloaded, 80 * GB)
    assert refusal is None
    assert sizes.max_tokens_per_microbatch >= 8192
    assert choice.can_keep_cache(offloaded, sizes, 80 * GB)
    assert sizes.cache_tokens > 0.97 * 144 * (4396 + 256)  # nearly all completions of the group at once
    # Of a rank's eighths of tensors in fp32: masters and gradients are pinned, moments are not.
    pinned = 80 * (2 * 2**25 + 2 * 2**22 + 3 * 2**27) + 2 * 2**29
    needed = 8 * 2 * pinned + 8 * pinned / 2 + 8 * parameters + (12 + 2) * parameters
    assert total(needs.host_bytes(offloaded, num_ranks=8)) == pytest.approx(needed, rel=0.01)
    assert needed / 1e12 == pytest.approx(2.35, abs=0.05)
    assert "8 ranks need 2,3" in choice.host_too_small(offloaded, num_ranks=8, free=2000 * GB)

    adapted = make_workload(dataclasses.replace(LLAMA_70B, adapters=LORA), num_ranks=8, kl=True)
    assert planned(adapted, 80 * GB)[1] is None


def test_a_value_model_has_no_rows_to_decode_from():
    """All of it is trained: masters alone. Under adapters its own shards, whatever the policy's folder is."""
    value = dataclasses.replace(QWEN_7B, scalar_head=True)
    policy_rows = 2 * formulas.num_parameters(QWEN_7B) / 4
    of_both = make_workload(QWEN_7B, num_ranks=4, trained=(QWEN_7B, value))
    assert needs.always_bytes(of_both)["weights"] == policy_rows
    policy, value = (dataclasses.replace(config, adapters=LORA) for config in (QWEN_7B, value))
    for shares_base in (False, True):
        adapted = make_workload(policy, num_ranks=4, trained=(policy, value), shares_base=shares_base)
        own = formulas.num_parameters(policy), formulas.num_parameters(value)
        frozen = own[1] - formulas.num_trained_parameters(value)
        first_matrices = 28 * 16 * (6 * 3584 + 18944)
        rows = (own[0] - first_matrices) / 4 + first_matrices
        assert needs.always_bytes(adapted)["weights"] == 2 * (rows + frozen / 4)
        score = needs.phase_bytes(adapted, planned(adapted, 80 * GB)[0])["score (value model)"]
        assert score["gathered weights"] > 0


def test_reward_models_are_whole_and_parked_where_the_reference_is_sharded():
    judge = dataclasses.replace(QWEN_7B, scalar_head=True)
    work = make_workload(QWEN_7B, num_ranks=4, frozen={"reference": QWEN_7B, "reward model": judge})
    phases = needs.phase_bytes(work, planned(work, 80 * GB)[0])
    assert needs.always_bytes(work)["reference"] == 2 * formulas.num_parameters(QWEN_7B) / 4
    assert "reference" not in phases["score (reference)"]
    assert phases["score (reward model)"]["reward model"] == 2 * formulas.num_parameters(judge)
    assert needs.host_bytes(work)["parked models"] == formulas.pinned_bytes(judge, 2)


def test_the_plan_computes_what_the_page_says():
    """Every row of its table on shards."""
    work = make_workload(QWEN_32B, num_ranks=8, kl=True)
    sizes = Sizes(64, 10_000, 4096, recompute_layers=False, shard_gradients=True)
    always, phases = needs.always_bytes(work), needs.phase_bytes(work, sizes)
    computed = {
        "rows to decode from": always["weights"],
        "sharded reference": always["reference"],
        "gathered weights, with U parameters in a layer": phases["update"]["gathered weights"],
        "cached token in a group": phases["generate"]["cache"] / 10_000,
    }
    letters = {
        "P": formulas.num_parameters(QWEN_32B),
        "U": formulas.layer_parameters(QWEN_32B),
        "L": 64,
        "K": 1024,
        "W": 8,
    }
    assert computed == {row: pytest.approx(formula(row, **letters)) for row in computed}
    whole = needs.phase_bytes(dataclasses.replace(work, decode_group=1), sizes)["generate"]["decode logits"]
    assert phases["generate"]["decode logits"] == 2 * whole


@pytest.mark.slow
def test_the_plan_counts_the_gathers_of_each_family():
    """Those of the layers' columns, the embedding and the logits."""
    for name, (raw, _) in PUBLISHED.items():
        config = config_from_dict(raw)
        model = on_meta(config)
        slice_model(model, Slices(0, 2, None))
        linear = [module for module in model.model.layers.modules() if isinstance(module, Linear)]
        in_layers = sum(module.gathers_input + module.gathers_output for module in linear)
        assert formulas.num_gathers(config) == in_layers + 2, name


def test_the_model_of_a_decode_step_gathers_what_the_plan_counts(monkeypatch):
    """By hand, 64 rows of 2,048 tokens, 32B on 8 ranks: 258 gathers, of 7 / 8 of all columns and logits."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    model = importlib.import_module("shard_decode")
    parts = model.step_parts(model.SHAPES["32B"], 8, rows=64, context=2048, gather_s=1e-5)
    columns = 2 * 64 * (40 * 128 + 27648 + 2 * 5120) + 4 * 152064 + 2 * 5120
    assert formulas.num_gathers(QWEN_32B) == 258
    assert parts["gathers"] == pytest.approx(258 * 1e-5 + 64 * columns * 7 / 8 / 350e9)
    assert parts["cache"] == pytest.approx(64 * 2048 * 4 * 64 * 128 / 3e12)
    # No faster than the rows of the weights are read.
    assert parts["products"] > 2 * (64 * formulas.layer_parameters(QWEN_32B) + 152064 * 5120) / 8 / 3e12
    assert sum(parts.values()) == pytest.approx(10.3e-3, abs=0.1e-3)


AUTO, ON, OFF = ({"shard_decode": mode} for mode in ("auto", "on", "off"))


@pytest.mark.parametrize(
    ("flags", "policy", "recorded", "groups"),
    [
        (AUTO, QWEN_32B, {}, [1, 8]),
        (AUTO | {"decode_group": 4}, QWEN_7B, {}, [1, 4]),
        (AUTO, QWEN_7B, {}, [1, 4]),  # its 4 key/value heads cannot be split among 8 ranks
        (AUTO, dataclasses.replace(QWEN_7B, num_key_value_heads=1), {}, [1]),
        (AUTO | {"shard_gradients": "off"}, QWEN_32B, {}, [1]),
        (AUTO, QWEN_32B, {"decode_group": 8}, [8]),
        (AUTO, QWEN_32B, {"decode_group": 1}, [1]),
        (AUTO, QWEN_32B, {"decode_group": 4}, [1, 8]),  # the run began on other nodes
        (ON, QWEN_32B, {"decode_group": 1}, [8]),
        (ON, QWEN_7B, {}, [4]),
        (ON | {"decode_group": 2}, QWEN_7B, {}, [2]),
        (OFF, QWEN_32B, {"decode_group": 8}, [1]),
    ],
)
def test_ranks_decode_together_if_flags_heads_and_the_runs_beginning_allow_it(
    flags, policy, recorded, groups
):
    """On two nodes of 8 ranks."""
    found = possible_decode_groups(RunConfig(**flags), policy, num_ranks=16, of_node=8, recorded=recorded)
    assert found == groups


@pytest.mark.parametrize("flags", [AUTO | {"decode_group": 8}, ON | {"decode_group": 8}])
def test_heads_that_cannot_be_split_are_refused_with_the_sizes_that_can(flags):
    with pytest.raises(InputError, match="--decode-group 8: the model's 4 key/value heads") as refusal:
        possible_decode_groups(RunConfig(**flags), QWEN_7B, num_ranks=8, of_node=8, recorded={})
    assert "take --decode-group 2 or --decode-group 4 or --shard-decode off" in str(refusal.value)


def test_nodes_of_one_rank_decode_together_only_if_their_number_is_given():
    nodes = {"policy": QWEN_7B, "num_ranks": 2, "of_node": 1, "recorded": {}}
    with pytest.raises(InputError, match="4 key/value heads cannot be split among the ranks of a node, 1;"):
        possible_decode_groups(RunConfig(**ON), **nodes)
    assert possible_decode_groups(RunConfig(**AUTO), **nodes) == [1]
    assert possible_decode_groups(RunConfig(**ON, decode_group=2), **nodes) == [2]
