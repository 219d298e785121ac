"""The model against transformers on random checkpoints of every family, and what packing may not change."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from minirl.generation.engine import Engine, Request
from minirl.model import batch_invariance
from minirl.model.attention import PackedLayout
from minirl.model.families import read_config
from minirl.model.rotation import Rotation, rotate
from minirl.model.transformer import Transformer
from minirl.model.weights import load_weights, named_parameters
from minirl.rollouts import RolloutId
from minirl.training.scoring import scalar_outputs, score

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
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 80,
    "beta_fast": 8.0,
}
ROPE_OF_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
}
GAINS = {"q_proj": 2.0, "k_proj": 2.0, "qkv_proj": 2.0, "lm_head": 3.0, "score": 3.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# name: (family, what differs from `make_checkpoint`'s own keys, the windows that this asks for)
CASES = {
    "llama": ("Llama", {}, (None, None)),
    "llama_tied_mha": (
        "Llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "mlp_bias": True},
        (None, None),
    ),
    "llama_mqa": (
        "Llama",
        {"num_key_value_heads": 1, "intermediate_size": 131, "attention_bias": True},
        (None, None),
    ),
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
    "qwen3_yarn": (
        "Qwen3",
        {"head_dim": 32, "rope_parameters": YARN_ROPE, "max_position_embeddings": 80},
        (None, None),
    ),
    "arcee": (
        "Arcee",
        {"rope_parameters": YARN_ROPE, "mlp_bias": True, "intermediate_size": 131},
        (None, None),
    ),
    "cwm": ("Cwm", {"sliding_window": 37, "head_dim": 24}, (None, 37)),
    "ernie4_5": ("Ernie4_5", {"head_dim": 24, "use_bias": True, "tie_word_embeddings": True}, (None, None)),
    "exaone4": (
        "Exaone4",
        {"sliding_window": 37, "sliding_window_pattern": 3, "num_hidden_layers": 3},
        (37, 37, None),
    ),
    "exaone4_full": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        (None, None),
    ),
    "gemma3_text": (
        "Gemma3Text",
        {
            "head_dim": 24,
            "sliding_window": 37,
            "layer_types": MIXED,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 50,
            "rope_parameters": ROPE_OF_KIND,
        },
        (37, None, 37),
    ),
    "glm": ("Glm", {"head_dim": 24, "attention_bias": True}, (None, None)),
    "glm4": ("Glm4", {"head_dim": 16, "intermediate_size": 131}, (None, None)),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.11,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.9,
            "attention_bias": True,
        },
        (None, None),
    ),
    "ministral": ("Ministral", {"sliding_window": 37, "head_dim": 24}, (37, 37)),
    "ministral3": (
        "Ministral3",
        {"head_dim": 24, "rope_parameters": YARN_ROPE | {"llama_4_scaling_beta": 0.4}},
        (None, None),
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4, "attention_bias": True}, (None, None)),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 37,
            "layer_types": MIXED,
            "num_hidden_layers": 3,
            "rope_parameters": ROPE_OF_KIND | {"full_attention": YARN_ROPE},
        },
        (37, None, 37),
    ),
    "phi3": ("Phi3", {"sliding_window": 37, "intermediate_size": 131}, (37, 37)),
    "phi3_longrope": (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.0, 1.1, 1.5, 2.0, 2.5, 3.0],
                "long_factor": [2.0] * 6,
                "partial_rotary_factor": 0.75,
            },
            "original_max_position_embeddings": 300,
            "tie_word_embeddings": True,
        },
        (None, None),
    ),
    "seed_oss": (
        "SeedOss",
        {"head_dim": 24, "attention_out_bias": True, "attention_bias": False},
        (None, None),
    ),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "tie_word_embeddings": True},
        (None, None, None),
    ),
    "smollm3_window": (
        "SmolLM3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 37, "mlp_bias": True},
        (None, 37),
    ),
}
# One of each family and feature: biases; a window and an odd width; some windows and tied weights' opposite; q/k norm.
FEATURES = ["llama_biases", "mistral_window", "qwen2_window_above", "qwen3"]


def make_checkpoint(name, scalar_head):
    """A transformers model with weights at which every feature matters: norms off 1, biases off 0, sharp attention."""
    family, overrides, _ = CASES[name]
    auto_class = AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM
    keys = {
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 320,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rms_norm_eps": 1e-5,
    }
    if family == "Qwen3":
        keys["head_dim"] = 16
    if scalar_head:
        keys["num_labels"] = 1
    config = getattr(transformers, f"{family}Config")(**keys | overrides)
    model = auto_class.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(len(str(overrides)))
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if param.ndim == 1:
            is_around_one = "norm" in name and family != "Gemma3Text"
            param.data = is_around_one + (0.3 if "norm" in name else 0.5) * noise
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
            model = make_checkpoint(name, scalar_head)
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
def test_logits_equal_transformers(name, checkpoints):
    """Every feature of every family means what it means in transformers, in a packed stream of sequences."""
    oracle, folder = checkpoints(name)
    model = load(folder)
    assert model.config.layer_windows == CASES[name][2]
    tokens = random_tokens(model, LENGTHS)
    packed = logits(model, tokens, LENGTHS)
    assert packed.dtype == torch.float32
    for got, part in zip(packed.split(LENGTHS), tokens.split(LENGTHS), strict=True):
        expected = oracle(part[None]).logits[0]
        assert expected.std() >= 0.8
        assert relative_error(got, expected) <= 1e-5


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
def test_values_scores_and_their_gradients_equal_transformers(name, checkpoints):
    """A value is the classifier's number for the state before its token; a packed sequence's score is that of a padded
    one in transformers. The gradient of each parameter follows. Pitfall 18."""
    oracle, folder = checkpoints(name, scalar_head=True)
    model, lengths = load(folder), (1, 150, 30)
    padding = model.config.vocab_size - 1
    tokens = random_tokens(model, lengths, seed=1) % padding
    layout = PackedLayout(lengths, CPU)
    values, after = scalar_outputs(model, tokens, layout, select=layout.positions > 0)
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
    rotation = Rotation(cos, sin)
    got = rotate(x.float(), rotation)
    torch.testing.assert_close(got.double(), torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-6)
    assert torch.equal(rotate(x, rotation), got.bfloat16())


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


@pytest.mark.parametrize("lengths", [LENGTHS, ()], ids=["sequences", "no tokens"])
@pytest.mark.parametrize("name", FEATURES)
def test_recomputed_layers_run_twice_and_change_no_bit_of_any_gradient(name, lengths, checkpoints):
    """Nor do they without tokens: every parameter then gets zeros, and none gets None or NaN."""
    layout = PackedLayout(lengths, CPU)
    gradients, calls = [], []
    for recompute in (False, True):
        model = load(checkpoints(name)[1], recompute_layers=recompute)
        model.model.layers[0].mlp.register_forward_pre_hook(lambda mlp, _: calls.append(mlp))
        tokens = random_tokens(model, lengths)
        outputs = score(model, tokens, layout, select=layout.positions > 0, temperature=0.7)
        torch.stack(outputs).sum().backward()
        gradients.append({key: param.grad for key, param in named_parameters(model).items()})
    assert len(calls) == 1 + 2
    for key, grad in gradients[0].items():
        assert torch.equal(gradients[1][key], grad), key
        assert (grad.norm() > 0) == bool(lengths), key


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


def test_greedy_engine_continues_a_real_checkpoint_as_transformers_generate(stories):
    """stories260K: 100 greedy tokens of three prompts, decoded together, and their logits are transformers'."""
    folder, oracle, prompts = stories
    model, stop_ids = load(folder), frozenset({1})
    engine = Engine(model, max_running_requests=4, cache_tokens=1024, dtype=torch.float32, device=CPU)
    requests = [
        Request(tuple(prompt), RolloutId(i, 0), i, max_new_tokens=100, temperature=0.0, stop_ids=stop_ids)
        for i, prompt in enumerate(prompts)
    ]
    for rollout, prompt in zip(engine.generate(requests), prompts, strict=True):
        expected = oracle.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=100)[0]
        assert rollout.tokens.tolist() == expected.tolist()
        assert len(rollout.completion) == 100 or rollout.completion[-1] == 1
        with torch.no_grad():
            got = logits(model, expected, [len(expected)])
            assert relative_error(got, oracle(expected[None]).logits[0]) <= 1e-5
