"""The model against transformers on random checkpoints of every family, and what packing may not change."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from minirl.generation.engine import Engine, Request
from minirl.model import batch_invariance
from minirl.model.attention import PackedLayout
from minirl.model.families import read_config
from minirl.model.rotation import rotate
from minirl.model.transformer import Transformer
from minirl.model.weights import load_replica, load_weights, named_parameters
from minirl.rollouts import RolloutId
from minirl.training.scoring import scalar_outputs, score
from support.layouts import layout_of, shuffled_members

CPU = torch.device("cpu")
LENGTHS = (1, 40, 129, 128, 7, 300)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GAINS = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 3.0, "score": 3.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# name: (family, what differs from `make_checkpoint`'s own keys, the windows that this asks for)
CASES = {
    "llama": ("Llama", {}, (None, None)),
    "llama_tied_mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}, (None, None)),
    "llama_mqa": ("Llama", {"num_key_value_heads": 1, "intermediate_size": 131}, (None, None)),
    "llama_head_dim": ("Llama", {"head_dim": 8, "rms_norm_eps": 0.1}, (None, None)),
    "llama_rope_llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}, (None, None)),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, (None, None)),
    "mistral": ("Mistral", {"sliding_window": None}, (None, None)),
    "mistral_window": ("Mistral", {"sliding_window": 37, "intermediate_size": 131}, (37, 37)),
    "mistral_window_one_block": ("Mistral", {"sliding_window": 128, "head_dim": 32}, (128, 128)),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, (None, None)),
    "qwen2_window_unused": ("Qwen2", {"use_sliding_window": False, "sliding_window": 33}, (None, None)),
    "qwen2_window_above": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1, "num_hidden_layers": 3},
        (None, 33, 33),
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, (None, None)),
    "qwen3_mixed_windows": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 130, "layer_types": MIXED, "num_hidden_layers": 3},
        (130, None, 130),
    ),
    "qwen3_bias": ("Qwen3", {"attention_bias": True, "head_dim": 8, "num_key_value_heads": 4}, (None, None)),
}
# One of each family and feature: biases; a window and an odd width; some windows and tied weights' opposite; q/k norm.
FEATURES = ["llama_biases", "mistral_window", "qwen2_window_above", "qwen3"]


def make_checkpoint(family, overrides, auto_class=AutoModelForCausalLM):
    """A transformers model with weights at which every feature matters: norms off 1, biases off 0, sharp attention."""
    keys = {
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 320,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rms_norm_eps": 1e-5,
    }
    if family == "Qwen3":
        keys["head_dim"] = 16
    config = getattr(transformers, f"{family}Config")(**keys | overrides)
    model = auto_class.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(len(str(overrides)))
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if param.ndim == 1:
            param.data = 1 + 0.3 * noise if "norm" in name else 0.5 * noise
        else:
            gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
            param.data = gain * noise / (1 if "embed" in name else param.shape[1] ** 0.5)
    return model.eval()


def load(folder, **options):
    model = Transformer(read_config(folder), **options)
    load_weights(model, folder)
    return model


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Makes, once per name and head, the transformers model of a case and its folder."""
    made = {}

    def get(name, *, scalar_head=False):
        if (name, scalar_head) not in made:
            family, overrides, _ = CASES[name]
            if scalar_head:
                model = make_checkpoint(
                    family, overrides | {"num_labels": 1}, AutoModelForSequenceClassification
                )
            else:
                model = make_checkpoint(family, overrides)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name, scalar_head] = (model, folder)
        return made[name, scalar_head]

    return get


def random_tokens(model, lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (sum(lengths),), generator=generator)


def hidden_states(model, tokens, lengths):
    layout = PackedLayout(tuple(lengths), CPU)
    return model(tokens, layout.positions, layout)


def logits(model, tokens, lengths):
    return batch_invariance.head_logits(hidden_states(model, tokens, lengths), model.lm_head.weight)


def relative_error(got, expected):
    assert got.shape == expected.shape
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


def assert_equal_gradients(model, got, oracle, expected):
    """Backward through one weighted sum of each gives every parameter the oracle's gradient."""
    oracle.zero_grad()
    weights = torch.linspace(-1, 2, len(expected))
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    oracle_params = dict(oracle.named_parameters())
    assert named_parameters(model).keys() == oracle_params.keys()
    for key, param in named_parameters(model).items():
        bound = 1e-4 * oracle_params[key].grad.norm()
        if key.endswith("k_proj.bias") and not model.config.qk_norm:
            # The softmax does not see a constant shift of the keys but for rope: a small sum of large terms.
            bound += 1e-3
        assert (param.grad - oracle_params[key].grad).norm() <= bound, key


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_equal_transformers_packed_and_alone(name, checkpoints):
    """Every feature of every family means what it means in transformers, whole streams or single sequences."""
    oracle, folder = checkpoints(name)
    model = load(folder)
    assert model.config.layer_windows == CASES[name][2]
    tokens = random_tokens(model, LENGTHS)
    parts = tokens.split(LENGTHS)
    expected = [oracle(part[None]).logits[0] for part in parts]
    assert torch.cat(expected).std() >= 1
    for part, logits_here in zip(parts, expected, strict=True):
        assert relative_error(logits(model, part, [len(part)]), logits_here) <= 1e-5
    packed = logits(model, tokens, LENGTHS)
    assert packed.dtype == torch.float32
    for got, logits_here in zip(packed.split(LENGTHS), expected, strict=True):
        assert relative_error(got, logits_here) <= 1e-5


@pytest.mark.parametrize("name", CASES)
def test_scores_and_parameter_gradients_equal_transformers(name, checkpoints):
    """Packed logprobs of the next tokens, and the gradient of each parameter, are those of the padded-free oracle."""
    oracle, folder = checkpoints(name)
    model, lengths = load(folder), (1, 150, 30)
    tokens = random_tokens(model, lengths, seed=1)
    layout = PackedLayout(lengths, CPU)
    got, _ = score(model, tokens, layout, select=layout.positions > 0, temperature=0.7)
    expected = []
    for part in tokens.split(lengths):
        logprobs = (oracle(part[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        expected += [torch.zeros(1), logprobs.gather(1, part[1:, None])[:, 0]]
    expected = torch.cat(expected)
    assert relative_error(got, expected) <= 1e-5
    assert_equal_gradients(model, got, oracle, expected)


@pytest.mark.parametrize("name", FEATURES)
@torch.no_grad()
def test_reward_model_scores_equal_transformers_packed_alone_and_padded(name, checkpoints):
    """A saved classifier scores each sequence of a stream as transformers does alone or padded. Pitfall 18."""
    oracle, folder = checkpoints(name, scalar_head=True)
    model = load_replica(folder, dtype=torch.float32, scalar_head=True)
    tokens = random_tokens(model, LENGTHS) % (model.config.vocab_size - 1)  # the last id is the padding
    parts, nothing = tokens.split(LENGTHS), torch.zeros(len(tokens), dtype=torch.bool)
    alone = torch.cat([oracle(part[None]).logits[0] for part in parts])
    oracle.config.pad_token_id = model.config.vocab_size - 1
    padded = oracle(torch.nn.utils.rnn.pad_sequence(parts, True, oracle.config.pad_token_id)).logits[:, 0]
    assert alone.std() >= 0.5
    _, packed = scalar_outputs(model, tokens, PackedLayout(LENGTHS, CPU), select=nothing)
    for expected in (alone, padded):
        assert relative_error(packed, expected) <= 1e-5
    for part, expected in zip(parts, alone, strict=True):
        got = scalar_outputs(model, part, PackedLayout((len(part),), CPU), select=nothing[: len(part)])[1]
        assert relative_error(got, expected[None]) <= 1e-5


@pytest.mark.parametrize("name", FEATURES)
def test_values_and_parameter_gradients_equal_transformers(name, checkpoints):
    """A value is the classifier's number for the state before its token; the gradient of each parameter follows."""
    oracle, folder = checkpoints(name, scalar_head=True)
    model, lengths = load(folder), (1, 150, 30)
    tokens = random_tokens(model, lengths, seed=1)
    layout = PackedLayout(lengths, CPU)
    values, after = scalar_outputs(model, tokens, layout, select=layout.positions > 0)
    states = [
        oracle.score(oracle.model(part[None]).last_hidden_state)[0, :, 0] for part in tokens.split(lengths)
    ]
    expected = torch.cat([torch.cat([torch.zeros(1), state[:-1]]) for state in states])
    assert expected.std() >= 0.5
    assert relative_error(values, expected) <= 1e-5
    last = torch.stack([state[-1] for state in states])
    assert relative_error(after, last) <= 1e-5
    assert_equal_gradients(model, torch.cat([values, after]), oracle, torch.cat([expected, last]))


@pytest.mark.parametrize("name", FEATURES)
@torch.no_grad()
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(name, checkpoints):
    """Norms, rope and softmax keep fp32 inside a bf16 model: its error is not above the bf16 oracle's."""
    oracle, folder = checkpoints(name)
    tokens = random_tokens(oracle, [300])
    exact = oracle(tokens[None]).logits[0]
    narrow = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.bfloat16)
    expected_error = relative_error(narrow(tokens[None]).logits[0], exact)
    model = load(folder).to(torch.bfloat16)
    got = logits(model, tokens, [300])
    assert got.dtype == torch.float32
    assert 0 < relative_error(got, exact) <= 1.1 * expected_error


def test_rope_turns_pairs_of_halves_and_rounds_bf16_once():
    """A head is C / 2 complex numbers, halves paired; the turn is in fp32 whatever the dtype of the heads."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, 16, generator=generator).bfloat16()
    angle = 100 * torch.rand(50, 1, 8, generator=generator)
    a, b = x.double().chunk(2, -1)
    turned = torch.complex(a, b) * torch.polar(torch.ones(50, 1, 8, dtype=torch.float64), angle.double())
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    got = rotate(x.float(), cos, sin)
    torch.testing.assert_close(got.double(), torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-6)
    assert torch.equal(rotate(x, cos, sin), got.bfloat16())


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_do_not_cross_sequences_or_time(name, checkpoints):
    """A position's logits have a gradient of exactly 0 in neighbours, later tokens and past its windows. Pitfall 2."""
    model = load(checkpoints(name)[1])
    lengths, row = (40, 90, 60), 40 + 80
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randperm(model.config.vocab_size, generator=generator)[: sum(lengths)]  # each token once
    embedded = []
    model.model.embed_tokens.register_forward_hook(lambda _, __, output: embedded.append(output))
    row_logits = logits(model, tokens, lengths)[row]
    (grad,) = torch.autograd.grad(row_logits.square().sum(), embedded)
    windows = model.config.layer_windows
    reach = lengths[0] + lengths[1] if None in windows else sum(window - 1 for window in windows)
    reached = torch.zeros(sum(lengths), dtype=torch.bool)
    reached[max(lengths[0], row - reach) : row + 1] = True
    assert torch.equal(grad.abs().sum(1) > 0, reached)


def load_exact(folder, dtype):
    """The model in `dtype`, and whether this machine's products are batch-invariant; no test of bf16 where not."""
    model = load(folder).to(dtype)
    is_exact = model.config.is_batch_invariant(dtype, CPU)
    if not is_exact and dtype == torch.bfloat16:
        pytest.skip("this machine's bf16 products are not batch-invariant")
    return model, is_exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_packed_hidden_states_equal_those_of_each_sequence_alone(name, dtype, checkpoints):
    """Bit for bit where this machine's products are batch-invariant, whatever is packed together. Pitfalls 2 and 3."""
    model, is_exact = load_exact(checkpoints(name)[1], dtype)
    tokens = random_tokens(model, LENGTHS)
    packed = hidden_states(model, tokens, LENGTHS)
    assert packed.dtype == dtype
    for got, part in zip(packed.split(LENGTHS), tokens.split(LENGTHS), strict=True):
        alone = hidden_states(model, part, [len(part)])
        assert torch.equal(got, alone) if is_exact else relative_error(got, alone) <= 1e-5


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", FEATURES)
def test_an_empty_stream_gives_zero_gradients(name, recompute, checkpoints):
    """A rank without tokens runs the same forward and backward: every parameter gets zeros, none gets None or NaN."""
    model = load(checkpoints(name)[1], recompute_layers=recompute)
    nothing = torch.empty(0, dtype=torch.int64)
    layout = PackedLayout((), CPU)
    assert model(nothing, layout.positions, layout).shape == (0, model.config.hidden_size)
    logprobs, entropies = score(model, nothing, layout, select=nothing.bool(), temperature=1.0)
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    for key, param in named_parameters(model).items():
        assert param.grad is not None, key
        assert torch.equal(param.grad, torch.zeros_like(param)), key


# Prompt, then the own tokens of each member; members of all families are shuffled, so few are beside their parent.
FAMILIES = [
    (1, 3, 140),
    (127, 1, 2, 60),
    (128, 5, 128, 1, 20),
    (129, 1, 130, 7, 2, 40),
    (300, 20, 1),
    (0, 150),
    (40, 9),
]


def shared_stream(model, families, seed=0):
    """Tokens of these families' sequences end to end, and the layouts with and without shared prompts."""
    members = shuffled_members(families, seed)
    prompts = [random_tokens(model, [prompt], seed=i) for i, (prompt, *_) in enumerate(families)]
    own = [random_tokens(model, [n], seed=50 + j) for j, (_, n) in enumerate(members)]
    tokens = torch.cat(
        [x for (prompt, _), y in zip(members, own, strict=True) for x in (prompts[prompt.ordinal], y)]
    )
    shared = layout_of(members)
    return tokens, shared, PackedLayout(shared.lengths, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*FEATURES, "qwen3_mixed_windows", "mistral_window_one_block"])
@torch.no_grad()
def test_hidden_states_of_shared_prompts_equal_those_of_each_sequences_own(name, dtype, checkpoints):
    """Bit for bit where products are batch-invariant: prompts of 1 to 300 tokens, up to five members, unshared ones."""
    model, is_exact = load_exact(checkpoints(name)[1], dtype)
    for seed in range(2):
        tokens, shared, alone = shared_stream(model, FAMILIES, seed)
        assert torch.equal(tokens[shared.computed_tokens][shared.hidden_index], tokens)
        got = model(tokens[shared.computed_tokens], shared.positions, shared)
        expected = model(tokens, alone.positions, alone)
        assert len(got) == sum(prompt + sum(owns) for prompt, *owns in FAMILIES) < len(expected) - 900
        got = got[shared.hidden_index]
        assert torch.equal(got, expected) if is_exact else relative_error(got, expected) <= 1e-5


def shared_gradients(model, tokens, layout):
    """What every parameter gets from a weighted sum of logprobs and entropies."""
    starts = PackedLayout(layout.lengths, CPU).positions == 0
    model.zero_grad()
    outputs = torch.stack(score(model, tokens, layout, select=~starts, temperature=0.7))
    (outputs * torch.linspace(-1, 2, outputs.numel(), dtype=outputs.dtype).view_as(outputs)).sum().backward()
    return {key: param.grad for key, param in named_parameters(model).items()}


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in FEATURES[:3])]
)
def test_gradients_of_shared_prompts_equal_those_of_each_sequences_own(name, checkpoints):
    """In fp64, every parameter, prompt tokens under the loss too.

    `recompute_layers` runs each layer twice and changes no bit of any gradient, with shared prompts or without.
    """
    folder = checkpoints(name)[1]
    model, recomputing = load(folder).double(), load(folder, recompute_layers=True).double()
    tokens, shared, alone = shared_stream(model, FAMILIES)
    calls = []
    for one in (model, recomputing):
        one.model.layers[0].mlp.register_forward_pre_hook(lambda module, _: calls.append(module))
    got, expected = (shared_gradients(model, tokens, layout) for layout in (shared, alone))
    assert len(calls) == 2
    recomputed = [shared_gradients(recomputing, tokens, layout) for layout in (shared, alone)]
    assert len(calls) == 2 + 4
    scale = max(float(grad.norm()) for grad in expected.values())
    for key, grad in expected.items():
        assert grad.norm() > 1e-12 * scale, key
        assert (got[key] - grad).norm() <= 1e-12 * max(float(grad.norm()), 1e-2 * scale), key
        assert torch.equal(recomputed[0][key], got[key]), key
        assert torch.equal(recomputed[1][key], grad), key


@pytest.fixture(scope="module")
def stories(data_folder):
    """The real checkpoint: its folder, transformers' model, and three prompts as token ids."""
    folder = data_folder / "stories260K"
    oracle = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = (
        "Once upon a time, there was a",
        "Tim had a red ball. One day",
        "Lily and her mom went to the park",
    )
    return folder, oracle, [tokenizer(text)["input_ids"] for text in texts]


@torch.no_grad()
def test_logits_of_a_real_checkpoint_equal_transformers(stories):
    """stories260K: logits on its own greedy text are transformers', packed and alone."""
    folder, oracle, prompts = stories
    model = load(folder)
    sequences = [
        oracle.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60)[0] for prompt in prompts
    ]
    lengths = [len(sequence) for sequence in sequences]
    packed = logits(model, torch.cat(sequences), lengths).split(lengths)
    for got, sequence in zip(packed, sequences, strict=True):
        expected = oracle(sequence[None]).logits[0]
        assert relative_error(got, expected) <= 1e-5
        assert relative_error(logits(model, sequence, [len(sequence)]), expected) <= 1e-5


def test_greedy_engine_continues_a_real_checkpoint_as_transformers_generate(stories):
    """stories260K: 100 greedy tokens of three prompts, decoded together, are the oracle's, token for token."""
    folder, oracle, prompts = stories
    engine = Engine(load(folder), max_running_requests=4, cache_tokens=1024, dtype=torch.float32, device=CPU)
    requests = [
        Request(
            tuple(prompt),
            RolloutId(i, 0),
            key=i,
            max_new_tokens=100,
            temperature=0.0,
            stop_ids=frozenset({1}),
        )
        for i, prompt in enumerate(prompts)
    ]
    for rollout, prompt in zip(engine.generate(requests), prompts, strict=True):
        expected = oracle.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=100)[0]
        assert rollout.tokens.tolist() == expected.tolist()
        assert len(rollout.completion) == 100 or rollout.completion[-1] == 1
