"""The formulas of docs/memory.md and of `minirl.plan` are the bytes that are really allocated; the chosen sizes fit."""

import dataclasses
import gc
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minirl.generation.kv_cache import KVCache
from minirl.model import attention
from minirl.model.config import LINEAR_LAYERS, Adapters, ModelConfig
from minirl.model.families import config_from_dict, read_config
from minirl.model.rotation import Rotation
from minirl.model.transformer import DecoderLayer
from minirl.plan import choice, formulas, needs
from minirl.plan.formulas import layer_bytes, num_parameters, num_trained_parameters
from minirl.plan.workload import Sizes, Workload
from minirl.training.batch import Batch
from minirl.training.frozen_models import FrozenModel
from minirl.training.scoring import score_batch
from minirl.training.sharded_model import ShardedModel
from support import models
from support.engines import CPU, cached_model, make_engine, make_request
from support.families import PUBLISHED
from support.memory import PAGE, allocated_bytes, formula, make_workload, saved_bytes
from support.models import adamw, make_folder, sharded
from support.rank_pool import RankPool

SHAPES = [
    # hidden, MLP, layers, query heads, key heads, channels of a head, tokens
    (256, 1024, 4, 8, 2, 32, 512),
    (512, 1024, 2, 4, 2, 64, 256),
    (192, 1024, 4, 3, 1, 64, 512),
    (384, 2048, 4, 6, 2, 64, 256),
]


def raw_config(shape: tuple[int, ...], vocab: int = 64) -> dict[str, Any]:
    hidden, inner, layers, heads, kv_heads, head_dim, _ = shape
    raw = models.qwen2_config(hidden, inner, layers, heads, kv_heads, vocab=vocab, tied=False)
    return raw | {"model_type": "llama", "max_position_embeddings": 1024, "head_dim": head_dim}


SMALL = config_from_dict(raw_config(SHAPES[0]))


def sizes_of(config: ModelConfig) -> dict[str, float]:
    head_dim = config.head_dim
    return {
        "L": config.num_hidden_layers,
        "D": config.hidden_size,
        "F": config.intermediate_size,
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
    """Saves the same tensors as CUDA's fused norm; torch has no such kernel for meta tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size, weight: Tensor, eps: float) -> Tensor:
        inverse_rms = x.new_empty(len(x), 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse_rms)
        return torch.empty_like(x)


def backward(model: ShardedModel, batch: Batch, *, is_last: bool) -> None:
    """Of one microbatch."""
    logprobs, _ = score_batch(model.module, batch)
    model.backward(logprobs.sum(), is_last=is_last)


@pytest.fixture
def saved_by_a_layer(monkeypatch):
    """Counts them on meta tensors: torch 2.11's attention for sequences of varying lengths, and a fused norm."""
    pytest.importorskip("triton")
    from minirl.kernels import fused_gate, fused_rotation

    launches_nothing = defaultdict(lambda: lambda *args, **constants: None)  # with any grid
    monkeypatch.setattr(attention, "kernel_for", lambda device, dtype: "varlen")
    monkeypatch.setattr(attention, "takes_shared_key_heads", lambda varlen_attn: False)
    monkeypatch.setattr(torch.nn.functional, "rms_norm", FusedNorm.apply)
    monkeypatch.setattr(fused_gate, "gate_kernel", launches_nothing)
    monkeypatch.setattr(fused_rotation, "rotation_kernel", launches_nothing)

    def count(config, num_tokens, number=0):
        layout = make_batch(num_tokens).layout()
        with torch.device("meta"):
            layer = DecoderLayer(config, number).to(torch.bfloat16)
            x = torch.empty(num_tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            rope = torch.empty(num_tokens, 1, 2 * len(config.ropes[0].frequencies))
        scale = rope[..., :1] if config.query_multiplier != 1 or config.query_growth else None
        rotation = Rotation(rope, rope, config.ropes[0].is_interleaved, scale)
        return saved_bytes(layer, lambda: layer(x, rotation, layout)) - rope.nbytes

    return count


def test_a_layer_of_each_family_saves_what_the_plan_says(saved_by_a_layer):
    """On average over the layers with attention and those with a gated delta net."""
    for name, (raw, _) in PUBLISHED.items():
        config = config_from_dict(raw)
        expected = 64 * layer_bytes(config, torch.bfloat16)
        first_of_kind = {}
        for number in range(config.num_hidden_layers):
            first_of_kind.setdefault(number in config.attention_windows, number)
        share = len(config.attention_windows) / config.num_hidden_layers
        saved = sum(
            (share if has_attention else 1 - share) * saved_by_a_layer(config, 64, number)
            for has_attention, number in first_of_kind.items()
        )
        assert saved == pytest.approx(expected, rel=0.005), name


def test_the_example_follows_from_the_table():
    """Its numbers, in the order of the page."""
    example = PAGE[PAGE.index("Qwen2.5-1.5B") :].partition("\n\n")[0]
    sizes = {name: float(number) for name, number in re.findall(r"\b([A-Z]) ([\d.e]+)", example)}
    sizes["W"] = 8
    sizes["A"] = formula("a layer's activations of a token, A", **sizes)
    token = formula("token of a microbatch", **sizes)
    recomputed = formula("token of a microbatch with `--recompute-layers on`", **sizes)
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


QWEN_1_5B, QWEN_7B, QWEN_14B = map(config_from_dict, (models.QWEN_1_5B, models.QWEN_7B, models.QWEN_14B))
AUTO = dict.fromkeys(Sizes.__dataclass_fields__, "auto")


def test_a_value_model_on_the_policys_base_holds_its_adapters_and_head():
    """And one of another folder its base too."""
    policy = dataclasses.replace(QWEN_7B, adapters=Adapters(16, 16.0, LINEAR_LAYERS))
    value = dataclasses.replace(policy, scalar_head=True)
    for shares_base, count in ((True, num_trained_parameters), (False, num_parameters)):
        work = make_workload(policy, trained=(policy, value), shares_base=shares_base)
        assert needs.always_bytes(work)["weights"] == 4 * (num_parameters(policy) + count(value))


def fitting(work: Workload, free: float) -> Sizes:
    """The sizes that are chosen; they fit."""
    sizes = choice.choose_sizes(work, free, AUTO)
    assert choice.too_large(work, sizes, free) is None
    assert needs.peak_bytes(work, sizes) <= choice.USABLE * free
    return sizes


@pytest.mark.parametrize("config", [SMALL, QWEN_7B], ids=["small", "7B"])
def test_the_code_computes_what_the_table_says(config):
    """Every row that has a formula, on 8 GPUs in bf16; on the CPU computed tensors take a factor more."""
    letters = sizes_of(config) | {
        "P": formulas.num_parameters(config),
        "V": config.vocab_size,
        "W": 8,
    }
    work = make_workload(config, num_ranks=8, dtype=torch.bfloat16, device_type="cuda")
    always = needs.always_bytes(work)
    sizes = Sizes(64, 10_000, 4096, recompute_layers=False, shard_gradients=False)
    phases = needs.phase_bytes(work, sizes)
    headless = dataclasses.replace(config, scalar_head=True)
    token = {"dtype": torch.bfloat16, "tokens": 1}
    letters["A"] = formulas.layer_bytes(config, torch.bfloat16)
    computed = {
        "weights, shared by generate, score and update": always["weights"],
        "masters and two moments": always["masters and moments"],
        "gradients, summed over microbatches": phases["update"]["gradients"],
        "reference": phases["score (reference)"]["reference"],
        "cached token": phases["generate"]["cache"] / 10_000,
        "a layer's activations of a token, A": letters["A"],
        "token of a microbatch": formulas.activation_bytes(headless, **token, recompute_layers=False),
        "token of a microbatch with `--recompute-layers on`": formulas.activation_bytes(
            headless, **token, recompute_layers=True
        ),
        "token without gradient": formulas.forward_bytes(headless, **token) - 12 * config.head_dim,
        "logits of a decode step, each request": formulas.decode_logits_bytes(config),
        "copies that a checkpoint is written from, on the host": needs.save_bytes(work),
    }
    assert computed == {row: pytest.approx(formula(row, **letters)) for row in computed}
    on_cpu = needs.phase_bytes(dataclasses.replace(work, device_type="cpu"), sizes)
    for phase, part in (
        ("generate", "prefill"),
        ("generate", "decode logits"),
        ("score (reference)", "forward"),
        ("update", "activations and logits"),
    ):
        assert on_cpu[phase][part] == needs.CPU_FACTOR * phases[phase][part]


def bytes_of_phases(rank: int, folder: Path, num_tokens: int, recompute: bool) -> dict[str, float]:
    """In the second update, generating and scoring: the bytes that a rank holds, and each peak on top."""
    model = sharded(folder, recompute_layers=recompute)
    optimizer = adamw(model)
    batch = make_batch(num_tokens)

    def update() -> None:
        for is_last in (False, True):
            backward(model, batch, is_last=is_last)
        model.step(optimizer, lr=0.1, max_grad_norm=1.0)

    update()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    shards = [tensor.to_local() for tensor in [*model.masters.values(), *moments]]
    held = sum(tensor.nbytes for tensor in [*model.compute_weights.values(), *shards])
    engine = make_engine(model.decoder, max_running_requests=4, cache_tokens=8 * num_tokens)
    requests = [
        make_request(
            [(i + j) % 60 for j in range(num_tokens - 4)], number=i, max_new_tokens=4, stop_ids=frozenset()
        )
        for i in range(2)
    ]
    outputs = score_batch
    reference = FrozenModel(model.decoder, outputs, names=["ref_logprobs"], device=CPU)
    return {
        "always": held,
        "update": allocated_bytes(update)[0],
        "generate": allocated_bytes(lambda: engine.generate(requests))[0],
        "score (reference)": allocated_bytes(lambda: reference.add_to(batch, [[0]]))[0],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "vocab", "recompute", "num_ranks"),
    [
        (SHAPES[0], 64, True, 1),
        (SHAPES[1], 6500, False, 1),
        (SHAPES[0], 64, False, 2),
        (SHAPES[2], 64, True, 1),
    ],
)
def test_no_phase_on_the_cpu_takes_more_than_the_code_says(
    one_rank, two_ranks, tmp_path, shape, vocab, recompute, num_ranks
):
    """The held bytes, to 2 %; besides cache and gradients, at least a third of the factor's allowance."""
    folder = make_folder(tmp_path / "model", raw_config(shape, vocab))
    num_tokens = shape[-1]
    pool = two_ranks if num_ranks == 2 else one_rank
    measured = pool.run(bytes_of_phases, folder, num_tokens, recompute)[0]
    work = make_workload(
        read_config(folder),
        num_ranks=num_ranks,
        longest_prompt=num_tokens - 4,
        longest=num_tokens,
        requests=2,
        update_tokens=num_tokens,
    )
    always = needs.always_bytes(work)
    held = always["weights"] + always["masters and moments"]
    assert measured.pop("always") == pytest.approx(held, rel=0.02)
    sizes = Sizes(4, 8 * num_tokens, num_tokens, recompute_layers=recompute, shard_gradients=False)
    phases = needs.phase_bytes(work, sizes)
    for phase, peak in measured.items():
        kept = sum(size for name, size in phases[phase].items() if name in ("cache", "gradients"))
        computed = sum(phases[phase].values()) - kept
        assert computed / 3 <= peak - kept <= computed, phase


@pytest.fixture(scope="module")
def one_of_eight() -> Iterator[RankPool]:
    """The first of eight ranks, without the others: they would take minutes, and it takes the same bytes."""
    pool = RankPool(8, is_fake=True)
    yield pool
    pool.stop()


def bytes_of_shards(
    rank: int, folder: Path, num_tokens: int, recompute: bool, sharding: dict[str, bool]
) -> dict[str, int]:
    """A model's held bytes with this sharding, those that the first of two microbatches leaves, and both's peak.

    Also a whole model's bytes in a microbatch besides gradients; with sharded weights a reference's held bytes, and the
    peak of scoring with it.
    """
    batch = make_batch(num_tokens)
    models = {"whole": sharded(folder, recompute_layers=recompute)}

    def load(name: str, **more: Any) -> int:
        return allocated_bytes(
            lambda: models.setdefault(name, sharded(folder, recompute_layers=recompute, **sharding, **more))
        )[1]

    def score(name: str) -> None:
        with torch.no_grad():
            score_batch(models[name].module, batch)
        models[name].reshard()

    def two_microbatches() -> None:
        backward(models["policy"], batch, is_last=False)
        backward(models["policy"], batch, is_last=True)

    backward(models["whole"], batch, is_last=False)
    found = {"activations": allocated_bytes(lambda: backward(models["whole"], batch, is_last=False))[0]}
    del models["whole"]
    gc.collect()  # now, not while the next one is measured
    found["policy"] = load("policy")
    score("policy")  # makes the rope table, which stays
    _, found["left"] = allocated_bytes(lambda: backward(models["policy"], batch, is_last=False))
    for master in models["policy"].masters.values():
        master.grad = None
    found["update"] = allocated_bytes(two_microbatches)[0]
    if "shard_weights" in sharding:
        found["reference"] = load("reference", is_frozen=lambda name: True)
        score("reference")
        found["score"] = allocated_bytes(lambda: score("reference"))[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(
    ("shape", "vocab", "recompute"),
    [
        (SHAPES[0], 64, False),
        (SHAPES[1], 10_000, False),
        (SHAPES[2], 64, True),
    ],
)
def test_sharded_gradients_take_what_the_code_says(
    one_rank, one_of_eight, tmp_path, monkeypatch, shape, vocab, recompute, on_host
):
    """Within 10 %, with the activations that are measured. On eight ranks each holds its share and one unit's at most.

    One rank sums them on the host: the device's bytes are the peak without the sums, as both are in one memory here.
    """
    folder = make_folder(tmp_path / "model", raw_config(shape, vocab))
    config, num_tokens = read_config(folder), shape[-1]
    pool = one_rank if on_host else one_of_eight
    sharding = {"offload_optimizer": on_host, "shard_gradients": True}
    (found,) = pool.run(bytes_of_shards, folder, num_tokens, recompute, sharding)
    monkeypatch.setattr(needs, "activation_bytes", lambda *args, **kwargs: found["activations"])
    monkeypatch.setattr(needs, "CPU_FACTOR", 1)
    num_ranks = 1 if on_host else 8
    lengths = {"longest": num_tokens, "update_tokens": num_tokens}
    work = make_workload(config, num_ranks=num_ranks, offloads_optimizer=on_host, **lengths)
    sizes = Sizes(4, 8 * num_tokens, num_tokens, recompute_layers=recompute, shard_gradients=True)
    update = needs.phase_bytes(work, sizes)["update"]
    sums = 4 * formulas.num_parameters(config) / num_ranks
    assert found["left"] == pytest.approx(sums, rel=0.02)
    assert update["gradients"] == pytest.approx(0 if on_host else sums)
    assert found["update"] - found["left"] * on_host == pytest.approx(sum(update.values()), rel=0.1)


@pytest.mark.slow
def test_sharded_weights_take_what_the_code_says(one_of_eight, tmp_path, monkeypatch):
    """Masters, rows and reference to 2 %; gathered weights and gradients to 10 %, with the activations measured."""
    folder = make_folder(tmp_path / "model", raw_config(SHAPES[3]))
    config, num_tokens = read_config(folder), SHAPES[3][-1]
    (found,) = one_of_eight.run(bytes_of_shards, folder, num_tokens, True, {"shard_weights": True})
    monkeypatch.setattr(needs, "activation_bytes", lambda *args, **kwargs: found["activations"])
    monkeypatch.setattr(needs, "CPU_FACTOR", 1)
    work = make_workload(config, num_ranks=8, decode_group=8, longest=num_tokens, update_tokens=num_tokens)
    always = needs.always_bytes(work)
    assert found["reference"] == pytest.approx(always["reference"], rel=0.02)
    masters = always["masters and moments"] / 3
    assert found["policy"] == pytest.approx(always["weights"] + masters, rel=0.02)
    phases = needs.phase_bytes(work, Sizes(4, 8 * num_tokens, num_tokens, True, True))
    assert found["update"] == pytest.approx(sum(phases["update"].values()), rel=0.1)
    gathered = phases["score (reference)"]["gathered weights"]
    assert gathered < found["score"] < 1.1 * (gathered + 2 * phases["score (reference)"]["forward"])


def test_auto_chooses_what_fits_and_no_more_than_is_of_use():
    """With less and less memory: first everything, then layers are recomputed, then less of all, then a refusal.

    Fault 38.
    """
    work = make_workload(SMALL)
    chosen = [fitting(work, free) for free in (64e9, 2e9, 1e9, 0.5e9, 0.3e9, 0.25e9)]
    assert chosen[0] == Sizes(256, 65536, 8192, recompute_layers=False, shard_gradients=False)
    for more, less in itertools.pairwise(chosen):
        assert more.recompute_layers <= less.recompute_layers
        assert more.cache_tokens >= less.cache_tokens
        is_alike = more.recompute_layers == less.recompute_layers
        assert more.max_tokens_per_microbatch >= less.max_tokens_per_microbatch or not is_alike
    assert chosen[-1].recompute_layers
    assert chosen[-1].max_tokens_per_microbatch < 8192
    assert chosen[-1].cache_tokens < 65536
    least = choice.choose_sizes(work, 0.2e9, AUTO)
    assert least.max_tokens_per_microbatch == work.longest
    assert "--max-tokens-per-microbatch" in choice.too_large(work, least, 0.2e9)
    assert "--nproc-per-node" in choice.too_large(work, least, 1e6)


GPUS_OF_80_GB = {"dtype": torch.bfloat16, "device_type": "cuda", "requests": 144}
FEW_TOKENS = {"num_ranks": 2, "enough_tokens": 812, "update_tokens": 812}


@pytest.mark.parametrize(
    ("work", "switches"),
    [
        (
            make_workload(SMALL, **FEW_TOKENS),
            {300e6: (False, False), 280e6: (False, True), 260e6: (True, False), 176e6: (True, True)},
        ),
        (
            make_workload(SMALL, **FEW_TOKENS | {"num_ranks": 1}),
            {350e6: (False, False), 240e6: (True, False)},
        ),
        (
            make_workload(QWEN_7B, **GPUS_OF_80_GB, offloads_optimizer=True),
            {200e9: (False, False), 80e9: (True, False), 50e9: (True, True)},
        ),
    ],
    ids=["two ranks", "one", "optimizer on the host"],
)
def test_gradients_are_sharded_before_layers_are_recomputed_unless_the_host_adds_them_up(work, switches):
    """With less and less memory: the sums overlap with backward, recomputation takes a third more time.

    For sums on the host each microbatch would wait. One rank shards nothing.
    """
    sizes = {free: fitting(work, free) for free in switches}
    assert {free: (x.recompute_layers, x.shard_gradients) for free, x in sizes.items()} == switches


@pytest.mark.parametrize(
    ("num_ranks", "models", "switches"),
    [
        (8, {"trained": (QWEN_7B,)}, (True, False)),
        (8, {"trained": (QWEN_7B,), "update_tokens": 4000}, (False, True)),
        (8, {"trained": (QWEN_7B, dataclasses.replace(QWEN_7B, scalar_head=True))}, (True, True)),
        (1, {"trained": (QWEN_1_5B,), "frozen": {"reference": QWEN_1_5B}}, (False, False)),
    ],
    ids=["GRPO 7B", "GRPO 7B with few tokens", "PPO 7B", "GRPO 1.5B on one"],
)
def test_at_the_defaults_it_fits_on_cards_of_80_gb(num_ranks, models, switches):
    """With fp32 masters and AdamW: layers are recomputed and gradients sharded only where it is needed."""
    work = make_workload(QWEN_7B, num_ranks=num_ranks, **GPUS_OF_80_GB, **models)
    sizes = fitting(work, 80e9)
    assert (sizes.recompute_layers, sizes.shard_gradients) == switches
    assert sizes.max_tokens_per_microbatch >= 8192
    assert sizes.cache_tokens >= 100 * work.longest


def test_what_is_kept_beside_the_cache_fits_to_the_byte():
    """On CUDA: the cache and its graphs beside the update."""
    work = make_workload(QWEN_1_5B, num_ranks=8, **GPUS_OF_80_GB)
    sizes = fitting(work, 40e9)
    phases = needs.phase_bytes(work, sizes)
    generate = phases.pop("generate")
    always = sum(needs.always_bytes(work).values())
    needed = always + generate["cache"] + generate["decode logits"] + sum(phases["update"].values())
    assert choice.can_keep_cache(work, sizes, needed / choice.USABLE + 10)
    assert not choice.can_keep_cache(work, sizes, needed / choice.USABLE - 10)
    assert needs.peak_bytes(work, sizes, keeps_cache=True) == pytest.approx(needed)
    assert choice.can_keep_cache(make_workload(QWEN_1_5B), sizes, 1e15)  # on the CPU too


def test_the_cache_is_kept_before_microbatches_grow_beyond_what_is_enough():
    """Then it gets smaller, down to half of what fits, before it is made again for each generation."""
    work = make_workload(QWEN_1_5B, num_ranks=8, **GPUS_OF_80_GB)
    found = []
    for free in (80e9, 38e9, 36e9):
        sizes = fitting(work, free)
        is_kept = choice.can_keep_cache(work, sizes, free)
        found.append((sizes.max_tokens_per_microbatch > 8192, sizes.cache_tokens / (144 * 1068), is_kept))
    expected = [(True, 1, True), (False, 0.82, True), (True, 1, False)]
    assert found == [pytest.approx(numbers, abs=0.01) for numbers in expected]


def test_a_model_that_is_sharded_over_a_node_takes_what_it_takes_on_the_node_alone():
    """On 4 nodes of 8: masters, moments, sharded gradients and a checkpoint's copies, by the node's ranks."""
    alone = make_workload(QWEN_7B, num_ranks=8, **GPUS_OF_80_GB)
    of_four = dataclasses.replace(alone, num_ranks=32)
    over_all = dataclasses.replace(of_four, num_shards=32)
    sizes = Sizes(64, 10_000, 4096, recompute_layers=False, shard_gradients=True)
    assert needs.always_bytes(of_four) == needs.always_bytes(alone)
    assert needs.phase_bytes(of_four, sizes) == needs.phase_bytes(alone, sizes)
    assert needs.host_bytes(of_four, num_ranks=8) == needs.host_bytes(alone, num_ranks=8)
    saved = needs.peak_bytes(of_four, sizes) - needs.peak_bytes(over_all, sizes)
    assert saved == pytest.approx((12 + 4) * (1 / 8 - 1 / 32) * formulas.num_parameters(QWEN_7B))
    offloaded = [dataclasses.replace(work, offloads_optimizer=True) for work in (of_four, over_all)]
    gradients = [needs.phase_bytes(work, sizes)["update"]["gradients"] for work in offloaded]
    assert gradients == [pytest.approx(4 * formulas.num_parameters(QWEN_7B) / 8), 0]
    assert "--shard-over world" in choice.too_large(of_four, sizes, 1e9)
    assert "--shard-over" not in choice.too_large(over_all, sizes, 1e9)


@pytest.mark.parametrize(
    ("config", "num_ranks", "free"),
    [(QWEN_7B, 1, 80e9), (QWEN_14B, 2, 80e9), (QWEN_1_5B, 1, 24e9)],
    ids=["7B on one of 80 GB", "14B on two of 80 GB", "1.5B on one of 24 GB"],
)
def test_with_the_optimizer_on_the_host_a_model_trains_that_would_not_fit(config, num_ranks, free):
    """By hand for P = 7.6156e9 on one: 2 P = 15.2 GB and gradients of 4 P = 30.5 GB remain of 18 P = 137 GB.

    Fault 38.
    """
    num_parameters = formulas.num_parameters(config)
    work = make_workload(config, num_ranks=num_ranks, **GPUS_OF_80_GB)
    refusal = choice.too_large(work, choice.choose_sizes(work, free, AUTO), free)
    assert refusal.startswith("the models need")
    assert "--offload-optimizer" in refusal
    offloaded = dataclasses.replace(work, offloads_optimizer=True)
    sizes = fitting(offloaded, free)
    always = needs.always_bytes(offloaded)
    assert always == {"weights": 2 * num_parameters, "rope tables": 8 * 32768 * 128}
    gradients = needs.phase_bytes(offloaded, sizes)["update"]["gradients"]
    assert gradients == (0 if sizes.shard_gradients else 4 * num_parameters)
    assert sizes.max_tokens_per_microbatch >= 8192


def test_pinned_memory_is_counted_as_torch_rounds_it_and_a_host_that_is_too_small_is_refused():
    """By hand: each tensor takes the next power of two; vectors are next to nothing. Shards: 70B in test_shard_plan.

    P = 7.6156e9 on 8 ranks: each parks 2 P, pinned, and copies 12 P / 8; the first copies 2 P more. Fault 38.
    """
    in_bf16 = 28 * (2 * 2**25 + 2 * 2**22 + 3 * 2**28) + 2 * 2**31
    parked, copied = 8 * in_bf16, (8 * 12 / 8 + 2) * 7.6156e9
    work = make_workload(QWEN_7B, num_ranks=8, **GPUS_OF_80_GB)
    assert needs.host_bytes(work, num_ranks=8) == {
        "parked models": pytest.approx(parked, rel=1e-4),
        "copies for a checkpoint": pytest.approx(copied, rel=1e-3),
    }
    needed = sum(needs.host_bytes(work, num_ranks=8).values())
    assert choice.host_too_small(work, num_ranks=8, free=1.001 * needed / choice.USABLE) is None
    reason = choice.host_too_small(work, num_ranks=8, free=0.99 * needed / choice.USABLE)
    assert (
        "8 ranks need 338 GB: parked models 232 GB, copies for a checkpoint 107 GB, of the 335 GB" in reason
    )
    assert "set --no-park-frozen, or take more nodes" in reason
    unparked = dataclasses.replace(work, parks_frozen=False)
    assert needs.host_bytes(unparked, num_ranks=8) == {
        "copies for a checkpoint": pytest.approx(copied, rel=1e-3)
    }
    offloaded = dataclasses.replace(work, offloads_optimizer=True)
    assert "leave out --offload-optimizer" in choice.host_too_small(offloaded, num_ranks=8, free=1e9)
    assert choice.host_too_small(make_workload(QWEN_7B), num_ranks=8, free=1.0) is None  # `too_large` says so


def test_a_size_that_is_given_wins():
    """Also one that does not fit."""
    given = Sizes(3, 900_000, 100_000, recompute_layers=False, shard_gradients=True)
    for name, value in dataclasses.asdict(given).items():
        sizes = choice.choose_sizes(make_workload(SMALL), 0.3e9, {**AUTO, name: value})
        assert getattr(sizes, name) == value


def test_a_step_that_fits_whole_takes_the_full_budget_with_any_memory():
    """So the numbers of a small run do not depend on what else the machine does."""
    work = make_workload(SMALL, update_tokens=900)
    for free in (64e9, 0.4e9):
        sizes = fitting(work, free)
        assert (sizes.max_tokens_per_microbatch, sizes.recompute_layers) == (8192, False)


@pytest.mark.parametrize("attention", ["full", "mixed", "states"])
def test_the_cache_takes_what_the_code_says(attention):
    """A window bounds it; gated delta nets have states."""
    config = cached_model(attention, torch.float32).config
    shape = {"num_kv_heads": config.num_key_value_heads, "head_dim": config.head_dim, "num_query_groups": 2}
    options = {"num_tokens": 4096, "max_sequences": 3, "dtype": torch.bfloat16, "device": CPU}
    cache = KVCache(config.attention_windows, delta_net=config.delta_net, **shape, **options)
    num_bytes = sum(pool.keys.nbytes + pool.values.nbytes for pool in cache.pools)
    assert formulas.cached_bytes(config, torch.bfloat16, tokens=4096, requests=3) == num_bytes
    of_states = sum(pool.nbytes for states in cache.states.values() for pool in states)
    assert formulas.state_bytes(config, torch.bfloat16, requests=3) == of_states
