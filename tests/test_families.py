"""Every family from its config.json to a training step: text, logprobs, exports, runs, and docs/families.md."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minirl.errors import InputError
from minirl.model.families import FAMILIES, config_from_dict, read_config
from minirl.model.transformer import is_batch_invariant
from minirl.model.weights import load_unsharded_model, passthrough_tensors, write_folder
from minirl.run.budget import num_parameters
from minirl.training.batch import pack
from support.engines import CPU, hidden_states, make_engine, make_request, scores_of
from support.families import (
    CASES,
    DELTA_NET,
    PUBLISHED,
    check_peft,
    family_table,
    flags_to_train,
    make_checkpoint,
    twin,
)
from support.marks import slow
from support.models import moved_weights
from support.resuming import resume
from support.scripts import ROOT, read_metrics, trained

DOCS = ROOT / "docs" / "families.md"
# The last case of each family, which has the most features.
OF_FAMILY = {CASES[name][0]: name for name in CASES}
TINY = "--num-steps 2 --group-size 3 --num-minibatches 1 --save-every 1"
# Together, these families have nearly every feature.
RUNS = [("gemma3_text", "train_ppo.py"), slow("qwen3_5_text", "train_grpo.py"), slow("olmo3", "train_ppo.py")]
FEW_PUBLISHED = ("OLMo-2-7B", "SmolLM3-3B")


@pytest.mark.parametrize("name", OF_FAMILY.values())
@torch.no_grad()
def test_text_is_that_of_transformers_and_logprobs_are_those_of_training(name, tmp_path):
    """Greedy tokens equal transformers', sampled logprobs equal training's, and transformers loads the export."""
    oracle = make_checkpoint(name)
    model = twin(oracle)
    engine = make_engine(model)
    prompts = [tuple(range(3, 3 + length)) for length in (5, 40)]
    requests = [
        make_request(
            prompt, number=i, member=t, max_new_tokens=16, temperature=float(t), stop_ids=frozenset()
        )
        for t in (0, 1)
        for i, prompt in enumerate(prompts)
    ]
    for rollout, request in zip(engine.generate(requests), requests, strict=True):
        if request.temperature == 0:
            options = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None}
            (expected,) = oracle.generate(torch.tensor([request.prompt_ids]), **options)
            assert rollout.tokens.tolist() == expected.tolist()
            continue
        if is_batch_invariant(model.config, torch.float32, CPU):
            assert torch.equal(scores_of(model, [rollout]), pack([rollout]).sample_logprobs)
    write_folder(tmp_path / "saved", dict(model.named_parameters()), config=oracle.config.to_dict())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in oracle.state_dict().items())


@pytest.mark.parametrize(("name", "script"), RUNS)
def test_steps_on_two_ranks_have_no_gap_and_a_resume_has_the_same_bits(
    two_ranks, runs, tmp_path, name, script
):
    folder = tmp_path / name
    make_checkpoint(name, vocab_size=16, eos_token_id=0, bos_token_id=1).save_pretrained(folder)
    flags = f"{flags_to_train(folder)} {TINY}"
    run = trained(two_ranks, runs / f"{name}-{script[6:-3]}", script, flags)
    for line in read_metrics(run):
        assert line["policy/logp_equal_frac"] == 1
    assert all(moved_weights(folder, run / "checkpoints/000002").values())
    resume(two_ranks, script, run, flags)


def test_the_page_lists_every_family_with_the_error_of_its_logits():
    """The errors are at most 2e-6."""
    listed = {name: float(error) for name, error in re.findall(r"`(\w+)` (\de-\d)", DOCS.read_text())}
    assert listed.keys() == FAMILIES.keys()
    for family, error in family_table().items():
        assert error <= min(2e-6, 2 * listed[family])


GEMMA = {
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "vocab_size": 90,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA_VISION = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN = DELTA_NET | {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 20, "num_hidden_layers": 2}
QWEN |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
QWEN_VISION = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def save_vision_model(folder, family):
    """Save a vision model. As in published models, Gemma's text_config lacks sizes, and Qwen has MTP weights."""
    sizes = {"hidden_size": 16, "intermediate_size": 8}
    if family == "gemma":
        vision = sizes | GEMMA_VISION
        config = transformers.Gemma3Config(
            text_config=GEMMA, vision_config=vision, mm_tokens_per_image=4, pad_token_id=0
        )
        transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder)
        raw = json.loads((folder / "config.json").read_text())
        for key in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
            del raw["text_config"][key]
        (folder / "config.json").write_text(json.dumps(raw))
        return
    ids = {key: 80 + i for i, key in enumerate(IDS)}
    config = transformers.Qwen3_5Config(
        text_config=QWEN, vision_config=sizes | QWEN_VISION, tie_word_embeddings=True, **ids
    )
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"mtp.places": torch.arange(3)}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["qwen", "gemma"])
@torch.no_grad()
def test_a_vision_models_folder_is_read_for_its_text_and_saved_whole(family, tmp_path):
    """The export has all original tensors, even integer ones. Keys that may change the text model are rejected."""
    save_vision_model(tmp_path, family)
    model = load_unsharded_model(tmp_path, dtype=torch.float32)
    tokens = torch.arange(70)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(tokens[None]).logits[0]
    got = model.lm_head(hidden_states(model, tokens))
    assert (got - expected).norm() <= 2e-6 * expected.norm()
    raw = json.loads((tmp_path / "config.json").read_text())
    kept = passthrough_tensors(model.config, tmp_path)
    write_folder(tmp_path / "saved", dict(model.named_parameters()), config=raw, passthrough=kept)
    assert not any(moved_weights(tmp_path, tmp_path / "saved").values())
    assert read_config(tmp_path / "saved") == model.config
    tied = {"tie_word_embeddings": not model.config.tie_word_embeddings}
    quantized = {"quantization_config": {"quant_method": "gptq"}}
    for changes in (tied, {"text_config": {"model_type": "qwen3"}}, quantized):
        with pytest.raises(InputError, match=next(iter(changes))):
            config_from_dict(raw | changes)


@pytest.mark.parametrize("family", ["qwen", "gemma"])
def test_peft_reads_adapters_for_the_text_of_a_vision_model(family, tmp_path):
    """PEFT may load transformers' text model alone or the whole vision model."""
    save_vision_model(tmp_path, family)
    for auto_class in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        check_peft(tmp_path, tmp_path / "saved", auto_class)


@pytest.mark.parametrize("name", [name if name in FEW_PUBLISHED else slow(name) for name in PUBLISHED])
def test_published_models_have_as_many_parameters_as_their_names_say(name):
    """The memory plan counts a model's parameters on the meta device."""
    raw, billions = PUBLISHED[name]
    assert num_parameters(config_from_dict(raw)) == pytest.approx(billions * 1e9, rel=0.01)
