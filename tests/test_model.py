"""The model equals transformers on random checkpoints of every family, in packed batches."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from minirl.model import batch_invariance
from minirl.model.attention import PackedLayout, Sequence
from minirl.training.batch import Batch, sequence_infos_from_lengths
from minirl.training.scoring import predict_values
from support.engines import CPU, hidden_states, score_at
from support.families import CASES, make_checkpoint, twin
from support.marks import slow

LENGTHS = (1, 40, 129, 128, 7, 300)
# One case for each family and feature: biases, a window, an odd width, mixed windows, untied weights, q/k norm.
FEATURES = ["llama_biases", "mistral_window", "qwen2_window_above", "qwen3", "qwen3_5_text_heads"]
FEATURES += ["gemma3_text", "olmo2"]
ALL_CASES = [name if name in FEATURES else slow(name) for name in CASES]


def random_tokens(model, lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (sum(lengths),), generator=generator)


def batch_of(tokens, lengths):
    """Return a batch in which all tokens but the first of each sequence are sampled."""
    mask = PackedLayout(tuple(map(Sequence, lengths)), CPU).positions > 0
    return Batch(sequence_infos_from_lengths(lengths), tokens, mask)


def logits(model, tokens, lengths):
    return batch_invariance.head_logits(hidden_states(model, *tokens.split(lengths)), model.head)


def relative_error(got, expected):
    assert got.shape == expected.shape
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


def assert_equal_gradients(model, got, oracle, expected):
    """Assert that backward through the same weighted sum gives every parameter the oracle's gradient."""
    oracle.zero_grad()
    weights = torch.linspace(-1, 2, len(expected))
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    oracle_params = dict(oracle.named_parameters())
    assert dict(model.named_parameters()).keys() == oracle_params.keys()
    for key, param in model.named_parameters():
        bound = 1e-4 * oracle_params[key].grad.norm()
        if key.endswith("k_proj.bias") and not model.config.qk_norm:
            # Without RoPE, softmax ignores a constant shift of the keys, so the gradient is a small sum of large terms.
            bound += 1e-3
        assert (param.grad - oracle_params[key].grad).norm() <= bound, key


@pytest.mark.parametrize("name", ALL_CASES)
def test_logits_scores_and_parameter_gradients_equal_transformers(name):
    """In packed batches, logits, next-token logprobs and each parameter's gradient equal transformers'. Pitfall 3."""
    oracle, lengths = make_checkpoint(name), (1, 129, 30, 300)
    model = twin(oracle)
    assert model.config.layer_windows == CASES[name][2]
    tokens = random_tokens(model, lengths, seed=1)
    got, _ = score_at(model, batch_of(tokens, lengths), 0.75)
    with torch.no_grad():
        packed = logits(model, tokens, lengths)
    assert packed.dtype == torch.float32
    expected = []
    for got_logits, part in zip(packed.split(lengths), tokens.split(lengths), strict=True):
        theirs = oracle(part[None]).logits[0]
        assert theirs.std() >= 0.8
        assert relative_error(got_logits, theirs) <= 1e-5
        logprobs = (theirs[:-1] / 0.75).log_softmax(-1)
        expected += [torch.zeros(1), logprobs.gather(1, part[1:, None])[:, 0]]
    expected = torch.cat(expected)
    assert relative_error(got, expected) <= 1e-5
    assert_equal_gradients(model, got, oracle, expected)


@pytest.mark.parametrize("name", FEATURES)
def test_values_scores_and_their_gradients_equal_transformers(name):
    """A token's value is the classifier's output for the state before the token. Pitfall 18.

    A packed sequence's score equals a padded sequence's in transformers, and so do all parameters' gradients.
    """
    oracle, lengths = make_checkpoint(name, scalar_head=True), (1, 150, 30)
    model = twin(oracle)
    padding = model.config.vocab_size - 1
    tokens = random_tokens(model, lengths, seed=1) % padding
    batch = batch_of(tokens, lengths)
    values, end_values = predict_values(model, batch)
    after = end_values[batch.last_token_index]
    parts = tokens.split(lengths)
    states = [oracle.score(oracle.model(part[None]).last_hidden_state)[0, :, 0] for part in parts]
    expected = torch.cat([torch.cat([torch.zeros(1), state[:-1]]) for state in states])
    assert expected.std() >= 0.5
    assert relative_error(values, expected) <= 1e-5
    oracle.config.pad_token_id = padding
    scores = oracle(torch.nn.utils.rnn.pad_sequence(parts, True, padding)).logits[:, 0]
    assert relative_error(after, scores) <= 1e-5
    assert_equal_gradients(model, torch.cat([values, after]), oracle, torch.cat([expected, scores]))


@pytest.mark.parametrize("name", FEATURES)
@torch.no_grad()
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(name):
    """Norms, RoPE and softmax stay in fp32 in a bf16 model, whose error is close to transformers' bf16 error."""
    oracle = make_checkpoint(name)
    tokens = random_tokens(oracle, [300])
    exact = oracle(tokens[None]).logits[0]
    options = {"attn_implementation": "eager", "dtype": torch.bfloat16}
    narrow = AutoModelForCausalLM.from_config(oracle.config, **options).eval()
    narrow.load_state_dict(oracle.state_dict())
    expected_error = relative_error(narrow(tokens[None]).logits[0], exact)
    model = twin(oracle).to(torch.bfloat16)
    got = logits(model, tokens, [300])
    assert got.dtype == torch.float32
    assert 0 < relative_error(got, exact) <= 1.1 * expected_error


@pytest.mark.parametrize("lengths", [LENGTHS, ()], ids=["sequences", "no tokens"])
@pytest.mark.parametrize("name", FEATURES)
def test_recomputed_layers_run_twice_and_change_no_bit_of_any_gradient(name, lengths):
    """Without tokens, every parameter gets a zero gradient, never None or NaN."""
    gradients, calls = [], []
    for recompute in (False, True):
        model = twin(make_checkpoint(name), recompute_layers=recompute)
        model.model.layers[0].mlp.register_forward_pre_hook(lambda mlp, _: calls.append(mlp))
        tokens = random_tokens(model, lengths)
        outputs = score_at(model, batch_of(tokens, lengths), 0.75)
        torch.stack(outputs).sum().backward()
        gradients.append({key: param.grad for key, param in model.named_parameters()})
    assert len(calls) == 1 + 2
    for key, grad in gradients[0].items():
        assert torch.equal(gradients[1][key], grad), key
        assert (grad.norm() > 0) == bool(lengths), key
