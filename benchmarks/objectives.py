"""Is each objective the published one? Loss and gradients against TRL's own trainers, on random ragged batches.

    pip install trl==1.16.0    # the CPU will do
    PYTHONPATH=. python benchmarks/objectives.py

Both sides get the same completions, rewards and logprobs of the policy and of the old, reference and sampling models,
in float64: groups of three completions of 1 to 20 tokens, some cut off, one group of equal rewards. TRL's side is its
`_generate_and_score_completions` (advantages, masks, importance weights) and `_compute_loss`, with sampling, rewards
and the forward pass replaced by the given numbers; minirl's are the functions of `train_grpo.py`, with a preset or flags.
Printed are the greatest differences of the loss, relative to TRL's, and of d loss / d logprob, relative to the greatest
of TRL's. Exits with 1 above the tolerance, with 2 without TRL.

Conventions that differ, and are made equal here or left out:
- To a std minirl adds 1e-6 and TRL 1e-4: here --advantage-eps 1e-4. TRL weights the KL term in the loss by the ratio: not here
  (use_bias_correction_kl=False) and not in the GRPO paper. Its cap of CISPO is absolute, 5 for --clip-high 4. Its
  two-sided clipping (delta) is --dual-clip, as long as the bound is above 1 + clip_high.
- --drop-truncated: sequence_mean and constant divide by the kept completions in minirl and by all of them in TRL; left
  out. Both divide by the kept tokens for token_mean, as in dapo.
- token_mean, several updates per step: by the update's own tokens in minirl, by the mean update's in TRL. One here.
- Dynamic sampling, reinforce++ and remax are not in TRL.
"""

import importlib.util
import logging
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minirl.ranks import process_group
from minirl.rewards.functions import overlong_penalty
from minirl.run.embedded_model import save_tokenizer
from minirl.training.batch import Batch, RolloutTable

sys.path.append(str(Path(__file__).parent.parent))
import train_grpo
from train_grpo import ALGORITHMS, Config

NUM_BATCHES = 50
TOLERANCE = 1e-9
STD_EPS = 1e-4  # TRL's
NUM_GROUPS, GROUP_SIZE = 3, 3  # TRL rounds n / (n - 1) of its stds to fp32: here that is exact
LIMIT, EOS, NUM_PROMPT_TOKENS = 20, 0, 2
CASES: dict[str, dict[str, Any]] = {
    **{name: ALGORITHMS[name] for name in ("default", "grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo")},
    "default, batch_std": dict(advantage_norm="batch_std"),
    "default, separate_rewards": dict(separate_rewards=True),
    "default, dual_clip": dict(dual_clip=1.5),
    "grpo, token_truncate": ALGORITHMS["grpo"] | dict(correction="token_truncate", correction_high=1.1),
    "gspo, token_mask": ALGORITHMS["gspo"] | dict(correction="token_mask", correction_low=0.9),
    "cispo, sequence_truncate": ALGORITHMS["cispo"]
    | dict(correction="sequence_truncate", correction_high=1.1),
    "default, sequence_mask": dict(correction="sequence_mask", correction_low=0.5),
}


@dataclass(frozen=True)
class Example:
    """Completions of one step; logprobs [M] of their tokens end to end, two rewards [N, 2]."""

    ids: list[list[int]]
    lengths: list[int]
    new: Tensor
    old: Tensor
    ref: Tensor
    sampled: Tensor
    rewards: Tensor


def make_example(seed: int) -> Example:
    """Random completions; each has moved from the old policy by a step of its own, of 1e-4 to 0.5 per token."""
    random, count = torch.Generator().manual_seed(seed), NUM_GROUPS * GROUP_SIZE
    lengths = torch.randint(1, LIMIT + 1, (count,), generator=random)
    lengths[:3] = torch.tensor([1, LIMIT, LIMIT])
    lengths.clamp_(max=LIMIT if seed % 2 else LIMIT // 2)  # none is cut off in every second batch
    is_cut = lengths == LIMIT
    is_cut[1] = False  # it ends by itself, at the limit
    ids = [
        [3] * (n - 1) + [3 if cut else EOS] for n, cut in zip(lengths.tolist(), is_cut.tolist(), strict=True)
    ]
    old, *noise = torch.randn(4, int(lengths.sum()), generator=random, dtype=torch.float64)
    old, steps = -old.abs(), 10 ** (torch.rand(count, generator=random, dtype=torch.float64) * 3.7 - 4)
    new = (old + steps.repeat_interleave(lengths) * noise[0]).requires_grad_()
    rewards = torch.randint(0, 3, (count, 2), generator=random).double() / 4
    rewards[:GROUP_SIZE] = 0.5
    ref, sampled = (
        old + 0.3 * noise[1],
        (old + 0.1 * noise[2]).float().double(),
    )  # TRL takes sampled ones as fp32
    return Example(ids, lengths.tolist(), new, old, ref, sampled, rewards)


def make_batch(x: Example) -> tuple[Batch, Tensor]:
    """The example as one packed batch, prompts included, and the new logprobs [T] of its stream."""
    lengths = [NUM_PROMPT_TOKENS + n for n in x.lengths]
    mask = torch.cat([torch.arange(n) >= NUM_PROMPT_TOKENS for n in lengths])
    batch = Batch(
        tuple(lengths),
        tokens=mask.long(),
        loss_mask=mask,
        sample_logprobs=torch.zeros(len(mask)),
        table_index=torch.arange(len(lengths)),
    )
    batch = batch.replace(
        sample_logprobs=batch.scatter(x.sampled),
        old_logprobs=batch.scatter(x.old),
        ref_logprobs=batch.scatter(x.ref),
    )
    return batch, batch.scatter(x.new)


def make_table(x: Example, rewards: Tensor) -> RolloutTable:
    """What every rank knows of the example's rollouts."""
    count = len(x.lengths)
    num_loss_tokens = torch.tensor(x.lengths)
    return RolloutTable(
        prompt_ordinal=torch.arange(count) // GROUP_SIZE,
        sample=torch.arange(count) % GROUP_SIZE,
        num_prompt_tokens=torch.full((count,), NUM_PROMPT_TOKENS),
        num_tokens=num_loss_tokens + NUM_PROMPT_TOKENS,
        num_loss_tokens=num_loss_tokens,
        is_truncated=torch.tensor([ids[-1] != EOS for ids in x.ids]),
        rewards=rewards,
    )


def minirl_loss(config: Config, x: Example) -> Tensor:
    """What `train_grpo.main` does with the example, by the functions of the script."""
    batch, new = make_batch(x)
    rewards = x.rewards.clone()
    if config.overlong_buffer:
        penalty = overlong_penalty(limit=LIMIT, buffer=config.overlong_buffer * LIMIT)
        rewards[:, 1] = torch.tensor(penalty(completion_ids=x.ids))
    groups = rewards.view(NUM_GROUPS, GROUP_SIZE, 2)
    reward_weights = torch.ones(2, dtype=torch.float64)
    advantages = train_grpo.token_advantages(config, groups, groups[:, :0], reward_weights, batch)
    weights = train_grpo.rollout_weights(config, make_table(x, rewards), LIMIT)
    micro = batch.replace(advantages=advantages, loss_weights=batch.spread(weights))
    loss, _ = train_grpo.token_loss(config, micro, new, torch.zeros_like(new))
    return (micro.loss_weights * loss).sum()


def make_trainer(c: Config, folder: str) -> Any:
    """TRL's trainer with the settings of a preset; num_iterations 2 makes it keep old logprobs."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    settings = dict(output_dir=folder, use_cpu=True, bf16=False, report_to=[])
    settings |= dict(
        per_device_train_batch_size=NUM_GROUPS * GROUP_SIZE, num_generations=GROUP_SIZE, num_iterations=2
    )
    settings |= dict(max_completion_length=LIMIT, mask_truncated_completions=c.drop_truncated)
    settings |= dict(epsilon=c.clip_low, epsilon_high=c.clip_high + (c.policy_loss == "cispo"))
    kind, args = RLOOTrainer, dict(beta=c.kl_reward_coef)
    if c.baseline != "leave_one_out":
        kind, args = (
            GRPOTrainer,
            dict(beta=c.kl_coef, use_bias_correction_kl=False, delta=c.dual_clip or None),
        )
        names = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
        args |= dict(loss_type="cispo" if c.policy_loss == "cispo" else names[c.loss_norm])
        args |= dict(scale_rewards=c.advantage_norm.removesuffix("_std"))
        args |= dict(importance_sampling_level=c.ratio_level.removesuffix("_mean"))
        args |= dict(multi_objective_aggregation="normalize_then_sum") if c.separate_rewards else {}
        args |= dict(
            vllm_importance_sampling_mode=c.correction, vllm_importance_sampling_clip_min=c.correction_low
        )
        args |= dict(vllm_importance_sampling_clip_max=c.correction_high)
    config = (GRPOConfig if kind is GRPOTrainer else RLOOConfig)(**settings, **args)
    rewards, rows = (
        [lambda **kwargs: [], lambda **kwargs: []],
        Dataset.from_list([{"prompt": "1"}] * NUM_GROUPS),
    )
    trainer = kind(model=folder, reward_funcs=rewards, args=config, train_dataset=rows)
    trainer.use_vllm = c.correction != "none"  # correct for the sampling model as if it were vLLM's
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def trl_loss(trainer: Any, c: Config, x: Example) -> Tensor:
    """TRL's own code from completions to the loss; it finds the example's numbers where it would compute them."""
    from trl.rewards import get_soft_overlong_punishment

    def padded(values: Tensor) -> Tensor:
        return pad_sequence(list(values.split(x.lengths)), batch_first=True)

    def forward(model: Any, *_: Any, compute_entropy: bool = False, **__: Any) -> tuple[Tensor, Tensor, None]:
        logprobs = padded(x.new if compute_entropy else x.ref if model is trainer.ref_model else x.old)
        return logprobs, torch.zeros_like(logprobs), None

    def generate(prompts: list[str]) -> tuple[Any, ...]:
        prompt_ids, texts = [[3] * NUM_PROMPT_TOKENS for _ in prompts], ["" for _ in prompts]
        if type(trainer).__name__ == "RLOOTrainer":
            return prompt_ids, x.ids, texts
        sampled = [part.tolist() for part in x.sampled.split(x.lengths)] if trainer.use_vllm else None
        return prompt_ids, x.ids, None, texts, sampled, {}, None, None

    rewards = x.rewards.clone()
    if c.overlong_buffer:
        punishment = get_soft_overlong_punishment(LIMIT, int(c.overlong_buffer * LIMIT))
        rewards[:, 1] = torch.tensor(punishment(completion_ids=x.ids))
    trainer._generate, trainer._get_per_token_logps_and_entropies = generate, forward
    trainer._calculate_rewards = lambda *_: rewards
    inputs = trainer._generate_and_score_completions([{"prompt": "1"}] * len(x.ids))
    return trainer._compute_loss(trainer.model, inputs)


def save_model(folder: str) -> None:
    """A tiny model with a tokenizer: TRL wants one, though its forward pass is replaced."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=EOS, bos_token_id=None)).save_pretrained(folder)
    save_tokenizer(Path(folder))


def compare(name: str, folder: str) -> tuple[float, float]:
    """Greatest relative differences of loss and gradient over all batches."""
    config = Config(**CASES[name], advantage_eps=STD_EPS)
    worst = torch.zeros(2, dtype=torch.float64)
    trainer = make_trainer(config, folder)
    for seed in range(NUM_BATCHES):
        x = make_example(seed)
        ours, theirs = minirl_loss(config, x), trl_loss(trainer, config, x)
        (mine,), (their,) = torch.autograd.grad(ours, x.new), torch.autograd.grad(theirs, x.new)
        found = [(ours - theirs).abs() / theirs.abs(), (mine - their).abs().max() / their.abs().max()]
        worst = torch.maximum(worst, torch.stack(found).detach())
    return tuple(worst.tolist())


def main() -> None:
    if importlib.util.find_spec("trl") is None:
        print(
            "TRL is not installed here: nothing was compared. pip install trl==1.16.0, see the top of this file"
        )
        sys.exit(2)
    import trl
    from transformers.utils.logging import disable_progress_bar

    process_group.start(device="cpu")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    disable_progress_bar()
    print(f"TRL {trl.__version__}, float64, {NUM_BATCHES} batches each, tolerance {TOLERANCE:.0e}")
    print(f"{'objective':26} {'batches':>7} {'loss':>9} {'gradient':>9}")
    is_equal = True
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for name in CASES:
            loss, gradient = compare(name, folder)
            is_equal &= max(loss, gradient) <= TOLERANCE
            print(f"{name:26} {NUM_BATCHES:7} {loss:9.1e} {gradient:9.1e}", flush=True)
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
