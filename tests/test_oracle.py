"""Recompute a step from its rollouts file, in double precision and with transformers alone.

The texts in rollouts/000001.jsonl give ids, logprobs, rewards, advantages, returns, losses and gradients, which must
equal the run's. The computation uses only that file's numbers and texts from minirl.
"""

import contextlib
import io
from collections import defaultdict
from unittest import mock

import pytest
import torch

import train_grpo
import train_ppo
from minirl.run.flags import parse
from minirl.training.sharded_model import ShardedModel
from support.models import full_tensor
from support.scripts import read_metrics, read_rollouts, write_rows
from support.texts import TOKENS, save_tokenizer

TOLERANCE = 1e-5
GAMMA, LAMBDA, ENTROPY_COEF = 0.97, 0.9, 0.01
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
FLAGS = "--model {folder}/policy --data {folder}/rows.jsonl --run-name oracle "
FLAGS += (
    "--num-steps 1 --prompts-per-step 4 --group-size 3 --num-minibatches 1 --max-new-tokens 14 --lr 1e-3 "
)
FLAGS += f"--reward episode --entropy-coef {ENTROPY_COEF} --max-grad-norm 0 --max-tokens-per-microbatch 120"
SCRIPTS = {
    "grpo": (train_grpo, ""),
    "ppo": (
        train_ppo,
        f"--gamma {GAMMA} --gae-lambda {LAMBDA} --bootstrap-truncated --value-lr 1e-3 "
        "--value-model {folder}/value",
    ),
}


async def two_turns_in_two_branches(episode):
    """Sample two turns in two branches. The second branch may be truncated, and some rewards do not apply."""
    other = episode.branch("two" * (episode.seed % 3 + 1))
    await episode.generate(max_tokens=4)
    await other.generate(stop=["e", "a"], max_tokens=5)
    await episode.generate(after="xyz", max_tokens=3)
    turn = await other.generate(after=" so ")
    return {"reward": None} if episode.seed % 7 == 0 else 1.0 / len(turn.ids)


def gradients_of_a_step(rank, script, flags, runs):
    """Run one step; return each model's gradients."""
    module = SCRIPTS[script][0]
    gradients, step = [], ShardedModel.step

    def watched_step(model, *args, **options):
        masters = model.masters.items()
        gradients.append({name: full_tensor(master.grad).double() for name, master in masters})
        return step(model, *args, **options)

    with (
        mock.patch.dict("os.environ", MINIRL_RUNS=str(runs)),
        mock.patch.object(module, "rollout", two_turns_in_two_branches),
        mock.patch.object(ShardedModel, "step", watched_step),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        assert module.main(parse(module.Config, description="", arguments=flags)) == 0
    return gradients


class Branch:
    """A branch as recorded in the file: ids, sampled mask, finish reason, and the rollout's reward and advantage."""

    def __init__(self, line, number, tokenizer):
        self.ids = tokenizer(line["prompt"])["input_ids"] if number == 0 else []
        self.mask = [False] * len(self.ids)
        for segment in line["segments"]:
            if segment["branch"] == number:
                new = tokenizer(segment["text"], add_special_tokens=False)["input_ids"]
                assert len(new) == segment["num_tokens"]
                self.ids += new
                self.mask += [segment["kind"] == "sampled"] * len(new)
        (facts,) = [facts for facts in line["branches"] if facts["branch"] == number]
        self.key, self.number, self.told_advantage = line["id"], number, line["advantage"]
        self.is_cut_off = facts["finish_reason"] in ("length", "max_turns", "max_tokens", "timeout")
        (self.score,) = line["rewards"].values()
        self.has_score = self.score is not None

    @property
    def sampled(self):
        """The positions of the sampled tokens."""
        return torch.tensor(self.mask).nonzero()[:, 0]


def masked_estimates(branch, values):
    """Compute GAE with its recursion over a sequence's tokens, skipping tokens that were not sampled.

    values: the value of the state after each token.
    """
    following, estimate = values[-1] if branch.is_cut_off else 0.0, 0.0
    paid = branch.score or 0.0  # at the last sampled token
    estimates = []
    for t in reversed(range(len(branch.ids))):
        if branch.mask[t]:
            estimate = paid + GAMMA * following - values[t - 1] + GAMMA * LAMBDA * estimate
            following, paid = values[t - 1], 0.0
            estimates.append(estimate)
    return torch.stack(estimates[::-1])


def group_relative(branches):
    """Return each branch's token advantages, which are the rollout's group-relative advantage."""
    groups = defaultdict(list)
    for branch in branches:
        if branch.has_score and branch.number == 0:
            groups[branch.key[0]].append(branch.score)
    advantages = []
    for branch in branches:
        scores = torch.tensor(groups[branch.key[0]], dtype=torch.float64)
        is_compared = branch.has_score and len(scores) > 1
        advantage = (branch.score - scores.mean()) / (scores.std() + 1e-6) if is_compared else 0.0
        advantages.append(torch.full([len(branch.sampled)], float(advantage), dtype=torch.float64))
    return advantages


def whitened(branches, estimates):
    """Whiten estimates over the tokens of all branches with a score; other branches get 0."""
    every = torch.cat([own for own, branch in zip(estimates, branches, strict=True) if branch.has_score])
    scale = torch.rsqrt(every.var() + 1e-8)
    return [
        (own - every.mean()) * scale * branch.has_score
        for own, branch in zip(estimates, branches, strict=True)
    ]


def check_policy(folder, branches, advantages, weight, metrics, gradients):
    """Check the policy's loss and gradients, the sampled logprobs, and the file's advantages."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total = 0.0
    for branch, advantage in zip(branches, advantages, strict=True):
        logprobs = model(torch.tensor([branch.ids])).logits[0].log_softmax(-1)[branch.sampled - 1]
        new = logprobs.gather(1, torch.tensor(branch.ids)[branch.sampled, None])[:, 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        loss = -torch.exp(new - new.detach()) * advantage - ENTROPY_COEF * entropy
        total = total + (weight * branch.has_score * loss).sum()
    for first, *of_both in zip(branches[::2], advantages[::2], advantages[1::2], strict=True):
        assert_close(first.told_advantage, torch.cat(of_both).mean())
    total.backward()
    assert_close(metrics["policy/loss"], total.detach())
    assert metrics["policy/logp_gap_max"] <= TOLERANCE
    assert_gradients(model, gradients, metrics["optim/grad_norm"])


def assert_close(got, expected):
    got, expected = (torch.as_tensor(numbers).double() for numbers in (got, expected))
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def assert_gradients(model, got, norm):
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in expected.items():
        error = (got[name] - gradient).norm() / gradient.norm()
        assert error < TOLERANCE, f"{name}: relative L2 error {error:.1e}"
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(expected.values())), rel=TOLERANCE)


@pytest.fixture
def folders(tmp_path):
    """Make a random language model, a random classifier, and rows; return their folder."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    tied = LlamaConfig(**SIZES, eos_token_id=1, tie_word_embeddings=True)
    LlamaForCausalLM(tied).save_pretrained(tmp_path / "policy")
    classifier = LlamaConfig(**SIZES, eos_token_id=1, num_labels=1)
    LlamaForSequenceClassification(classifier).save_pretrained(tmp_path / "value")
    for name in ("policy", "value"):
        save_tokenizer(tmp_path / name, None)
    rows = [{"prompt": text} for text in ("a stone", "the sea, the", "no", "why not.")]
    write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path


@pytest.fixture
def step_of(two_ranks, folders):
    """Return a function that runs a step and returns its gradients, branches, token weight and metrics."""
    from transformers import AutoTokenizer

    def step(script):
        flags = f"{FLAGS} {SCRIPTS[script][1]}".format(folder=folders)
        gradients, _ = two_ranks.run(gradients_of_a_step, script, flags.split(), folders / "runs")
        lines = read_rollouts(folders / "runs" / "oracle", 1)
        tokenizer = AutoTokenizer.from_pretrained(folders / "policy")
        branches = [Branch(line, number, tokenizer) for line in lines for number in (0, 1)]
        assert len(branches) == 4 * 3 * 2
        for kinds in ("is_cut_off", "has_score"):
            assert {getattr(branch, kinds) for branch in branches} == {True, False}
        weight = 1 / sum(len(branch.sampled) for branch in branches if branch.has_score)
        (metrics,) = read_metrics(folders / "runs" / "oracle")
        return gradients, branches, weight, metrics

    return step


def test_a_grpo_step_is_what_transformers_computes_from_the_file_of_its_rollouts(folders, step_of):
    """Both branches of a rollout have the rollout's advantage; some rewards do not apply.

    The first sampled token and the stop token have logprobs, an advantage and a loss. Pitfalls 1 and 13.
    """
    (gradients,), branches, weight, metrics = step_of("grpo")
    advantages = group_relative(branches)
    check_policy(folders / "policy", branches, advantages, weight, metrics, gradients)


def test_a_ppo_step_is_what_transformers_computes_from_the_file_of_its_rollouts(folders, step_of):
    """Each branch is rewarded at its end; only truncated branches are bootstrapped.

    Each model has its own gradient norm (Pitfall 49). transformers loads the saved value model as a classifier.
    """
    from transformers import LlamaForSequenceClassification

    (of_value, of_policy), branches, weight, metrics = step_of("ppo")
    critic = LlamaForSequenceClassification.from_pretrained(folders / "value", dtype=torch.float64)
    estimates, value_loss, olds, returns = [], 0.0, [], []
    for branch in branches:
        values = critic.score(critic.model(torch.tensor([branch.ids]))[0])[0, :, 0]
        estimates.append(masked_estimates(branch, values.detach()))
        old = values[branch.sampled - 1]
        if branch.has_score:
            olds.append(old.detach())
            returns.append(estimates[-1] + old.detach())
            value_loss = value_loss + (weight * (old - returns[-1]).square() / 2).sum()
    value_loss.backward()
    assert_close(metrics["value/loss"], value_loss.detach())
    assert_gradients(critic, of_value, metrics["value/grad_norm"])
    old, expected = torch.cat(olds), torch.cat(returns)
    assert_close(metrics["value/explained_var"], 1 - (expected - old).var() / expected.var())
    advantages = whitened(branches, estimates)
    check_policy(folders / "policy", branches, advantages, weight, metrics, of_policy)
    saved = folders / "runs" / "oracle" / "checkpoints" / "000001" / "value"
    trained, info = LlamaForSequenceClassification.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values()), info
    assert not torch.equal(trained.score.weight.double(), critic.score.weight)
