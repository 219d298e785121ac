"""Gated delta nets: states of packed, shared and cached sequences; fla's kernels; vision models' folders."""

import json
import sys
import types
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from minirl.errors import InputError
from minirl.extras.delta_net import rule as delta_rule
from minirl.model import device_kernels
from minirl.model.attention import PackedLayout
from minirl.model.families import config_from_dict, read_config
from minirl.model.transformer import Transformer, is_batch_invariant
from minirl.model.weights import kept_tensors, load_replica, named_parameters, save_folder
from support import stub_fla
from support.engines import (
    CPU,
    cached_model,
    finish,
    hidden_states,
    make_engine,
    make_prompt,
    make_request,
    mixed_requests,
    next_turn,
    scores_of,
)
from support.families import DELTA_NET
from support.marks import slow

# Around the borders of chunks of 32; with parents that share with another one, even more than their own tokens.
LENGTHS = (64, 200, 130, 70, 128, 129, 63, 300)
SHARED = ((0, 0), (1, 0), (1, 128), (2, 65), (1, 64), (4, 127), (1, 1), (1, 199))


def tokens_of(lengths, shared):
    """Random sequences that begin as `shared` says."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for length, (parent, num_shared) in zip(lengths, shared, strict=True):
        own = torch.randint(48, (length,), generator=generator)
        sequences.append(torch.cat([sequences[parent][:num_shared], own[num_shared:]]) if num_shared else own)
    return sequences


def test_sequences_that_share_their_beginning_have_the_bits_and_gradients_of_each_alone():
    """The chunk in which the shared tokens end is computed once more, from the state of the parent or its parent.

    Pitfall 65.
    """
    model = cached_model("states", torch.float32)
    is_exact = is_batch_invariant(model.config, torch.float32, CPU)
    sequences = tokens_of(LENGTHS, SHARED)
    layout = PackedLayout(LENGTHS, CPU, shared=SHARED)
    tokens = torch.cat(sequences)[layout.computed_tokens]
    packed = model(tokens, layout.positions, layout)[layout.hidden_index]
    gradients = []
    for outputs in (packed, torch.cat([hidden_states(model, sequence) for sequence in sequences])):
        assert torch.equal(outputs, packed) if is_exact else torch.allclose(outputs, packed, atol=1e-5)
        loss = (outputs * torch.linspace(-1, 1, outputs.shape[1])).square().sum()
        gradients.append(torch.autograd.grad(loss, model.parameters(), allow_unused=True))
    for got, expected in zip(*gradients, strict=True):
        assert expected is None or (got - expected).norm() <= 1e-4 * expected.norm()


@pytest.fixture
def fla(monkeypatch):
    """It is used where a test calls this."""
    return lambda: stub_fla.install(monkeypatch)


@pytest.mark.parametrize(
    ("lengths", "shared"), [slow(LENGTHS, ()), (LENGTHS, SHARED), ((5, 5), ((0, 0), (0, 5)))]
)
def test_fla_is_asked_for_what_the_chunks_compute(lengths, shared, fla, monkeypatch):
    """Outputs and gradients, also of sequences that begin where others are not at an end."""
    model = cached_model("states", torch.float64)
    layout = PackedLayout(lengths, CPU, shared=shared)
    tokens = torch.cat(tokens_of(lengths, shared or ((0, 0),) * len(lengths)))[layout.computed_tokens]
    results = []
    for install in (lambda: None, fla):
        install()
        outputs = model(tokens, layout.positions, layout)[layout.hidden_index]
        loss = (outputs * torch.linspace(-1, 1, outputs.shape[1])).square().sum()
        gradients = torch.autograd.grad(loss, model.parameters(), allow_unused=True)
        results.append([outputs, *(gradient for gradient in gradients if gradient is not None)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


def test_requests_decode_on_from_states_that_fla_prefilled(fla):
    """Wherever in a chunk the prompt ends. Slots hold NaN before, so a prefill must write its whole slot."""
    model = cached_model("states", torch.float64)
    expected = make_engine(model).generate(mixed_requests())
    fla()
    engine = make_engine(model, keeps_cache=True)
    engine.submit(mixed_requests())
    for states in engine._cache.states.values():
        for pool in states:
            pool.fill_(torch.nan)
    rollouts = {rollout.rollout_id: rollout for rollout in finish(engine, len(expected))}
    for twin in expected:
        rollout = rollouts[twin.rollout_id]
        assert rollout.tokens.equal(twin.tokens)
        torch.testing.assert_close(rollout.sample_logprobs, twin.sample_logprobs, rtol=0, atol=1e-6)


def test_fla_is_used_on_cuda_in_16_bits_if_it_can_be_imported(monkeypatch, capsys):
    """Else torch's form; an installed package that lacks the function is said once."""
    places = [
        ("cuda", torch.bfloat16),
        ("cuda", torch.float16),
        ("cuda", torch.float32),
        ("cpu", torch.bfloat16),
    ]
    for functions, note in (({"chunk_gated_delta_rule": print}, ""), ({}, "'chunk_gated_delta_rule'")):
        device_kernels.can_import.cache_clear()
        monkeypatch.setitem(sys.modules, stub_fla.MODULE, types.SimpleNamespace(**functions))
        chosen = [device_kernels.has_fla(torch.device(device), dtype) for device, dtype in places]
        assert chosen == [bool(functions)] * 2 + [False] * 2
        output = capsys.readouterr().out
        assert note in output
        assert output.count("\n") == bool(note)
    device_kernels.can_import.cache_clear()


@pytest.mark.parametrize("recompute_layers", [False, True])
def test_the_rule_runs_twice_in_a_step_whether_or_not_its_layer_is_recomputed(recompute_layers, monkeypatch):
    """Once in forward and once in backward, with the same gradients."""
    model = cached_model("states", torch.float32)
    twin = Transformer(model.config, recompute_layers=recompute_layers)
    twin.load_state_dict(model.state_dict())
    run_chunks = mock.Mock(wraps=delta_rule.run_chunks)
    gradients = []
    for each in (model, twin):
        monkeypatch.setattr(delta_rule, "run_chunks", run_chunks)
        run_chunks.reset_mock()
        hidden_states(each, torch.arange(40)).square().sum().backward()
        gradients.append([parameter.grad for parameter in each.parameters() if parameter.grad is not None])
        assert run_chunks.call_count == 2 * len(model.config.delta_net.layers)
        each.zero_grad()
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
def test_a_reused_slot_holds_nothing_of_the_sequence_before(dtype):
    """Slots without a sequence are always NaN: a prefill must write its whole slot. Logprobs equal those of training.

    Pitfalls 65 and 66.
    """
    model = cached_model("states", dtype)
    if not is_batch_invariant(model.config, dtype, CPU):
        pytest.skip("this machine's products are not batch-invariant")
    expected = make_engine(model).generate(mixed_requests())
    engine = make_engine(model, max_running_requests=3, keeps_cache=True)
    engine.submit(mixed_requests())
    rollouts = {}
    while engine.is_busy:
        cache = engine._cache
        free = [row for row in cache._free_rows if row < engine.max_running_requests + 1]
        for states in cache.states.values():
            for pool in states:
                pool[free] = torch.nan
        rollouts |= {rollout.rollout_id: rollout for rollout in engine.step()}
    for rollout in expected:
        sampled = rollouts[rollout.rollout_id].sample_logprobs
        assert torch.equal(sampled, rollout.sample_logprobs)
        assert torch.equal(scores_of(model, [rollout]), sampled)


def test_requests_between_turns_keep_places_and_give_them_up_where_none_would_run():
    """Else new requests would need more slots than there are, or wait for replies that wait for them."""
    engine = make_engine(cached_model("states", torch.float32), max_running_requests=2)
    requests = [
        make_request(make_prompt(5), number=i, stop_ids=frozenset(), max_new_tokens=4) for i in range(4)
    ]
    requests[:2] = [replace(request, holds=True) for request in requests[:2]]
    engine.submit(requests)
    held = {rollout.rollout_id: rollout for rollout in finish(engine, 2)}
    assert held.keys() == engine._held.keys()
    finish(engine, 2)
    assert engine.stats.drops >= 1
    engine.submit([next_turn(one, held[one.rollout_id], [1, 2], 2) for one in requests[:2]])
    finish(engine, 2)


@pytest.fixture
def gemma_folder(tmp_path):
    """A tiny vision model whose text_config leaves some sizes out, as those of Gemma 3 do."""
    text = {
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "vocab_size": 90,
    }
    vision = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "gemma")
    raw = json.loads((tmp_path / "gemma" / "config.json").read_text())
    for key in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        del raw["text_config"][key]
    (tmp_path / "gemma" / "config.json").write_text(json.dumps(raw))
    return tmp_path / "gemma"


@pytest.fixture
def vision_folder(tmp_path):
    """A tiny vision model with weights to predict further tokens."""
    text = DELTA_NET | {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 20, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 32}
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = Qwen3_5Config(
        text_config=text,
        vision_config=vision | {"num_position_embeddings": 16},
        tie_word_embeddings=True,
        **{key: 80 + i for i, key in enumerate(ids)},
    )
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "vision")
    path = tmp_path / "vision" / "model.safetensors"
    save_file(load_file(path) | {"mtp.fc.weight": torch.ones(2, 3)}, path, metadata={"format": "pt"})
    return path.parent


@pytest.mark.parametrize("fixture", ["vision_folder", "gemma_folder"])
@torch.no_grad()
def test_a_vision_models_folder_is_read_for_its_text_and_saved_whole(fixture, tmp_path, request):
    """transformers loads the export as it does the original, with vision and as a language model."""
    vision_folder = request.getfixturevalue(fixture)
    model = load_replica(vision_folder, dtype=torch.float32)
    tokens = torch.arange(70)
    expected = AutoModelForCausalLM.from_pretrained(vision_folder)(tokens[None]).logits[0]
    got = model.lm_head(hidden_states(model, tokens))
    assert (got - expected).norm() <= 2e-6 * expected.norm()
    raw = json.loads((vision_folder / "config.json").read_text())
    kept = kept_tensors(model.config, vision_folder)
    save_folder(tmp_path / "saved", named_parameters(model), config=raw, tokenizer_from=None, kept=kept)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (vision_folder, tmp_path / "saved")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert read_config(tmp_path / "saved") == model.config
    again, original = (
        AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "saved", vision_folder)
    )
    assert all(torch.equal(again[name], original[name]) for name in original)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings differs"),
        ({"text_config": {"model_type": "qwen3"}}, "text_config"),
        ({"text_config": None}, "text_config"),
        ({"architectures": ["Qwen3_5ForSequenceClassification"]}, "architectures"),
        ({"rope_theta": 3.0}, "rope_theta=3.0"),
    ],
)
def test_a_vision_models_config_that_says_otherwise_is_refused(vision_folder, changes, error):
    raw = json.loads((vision_folder / "config.json").read_text())
    config_from_dict(raw)
    with pytest.raises(InputError, match=error):
        config_from_dict(raw | changes)
