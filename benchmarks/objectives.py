"""Is each objective the published one? Loss and gradients compared with TRL's own trainers, on random ragged batches.

    pip install trl==1.16.0    # the CPU will do
    PYTHONPATH=. python benchmarks/objectives.py

Both sides get the same completions, rewards and logprobs of the policy and of the old, reference and sampling models,
in float64: groups of three completions of 1 to 20 tokens, some cut off, one group of equal rewards. TRL's side is its
`_generate_and_score_completions` (advantages, masks, importance weights) and `_compute_loss`, with sampling, rewards
and the forward pass replaced by the given numbers. minirl's side is the functions of `train_grpo.py`, with a preset or
flags. The output has the greatest differences of the loss, relative to TRL's, and of d loss / d logprob, relative to
the greatest of TRL's. Exits with 1 above the tolerance, with 2 without TRL.

Conventions that differ, and are made equal here or left out:
- To a std minirl adds 1e-6 and TRL 1e-4, as both do here. TRL weights the KL term in the loss by the ratio; this is
  switched off here (use_bias_correction_kl=False) and is not in the GRPO paper. Its cap of CISPO is absolute, 5 for
  --clip-high 4.
- --drop-truncated: sequence_mean and constant divide by the kept completions in minirl and by all of them in TRL; left
  out. Both divide by the kept tokens for token_mean, as in dapo.
- token_mean, several updates per step: by the update's own tokens in minirl, by the mean update's in TRL. One here.
- Dynamic sampling, reinforce++ and remax are not in TRL.

`objective_forks.py` compares the forks of docs/objectives.md.
"""

import importlib.util
import logging
import sys
import tempfile
import warnings
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minirl.episodes.step_groups import Groups
from minirl.ranks import process_group
from minirl.rewards.functions import OverlongPenalty
from minirl.rewards.rewarded import RewardedRollouts
from minirl.run.embedded_model import save_tokenizer
from minirl.training.advantages import group_advantages
from minirl.training.batch import Batch, RolloutTable
from minirl.training.losses import importance_weights

sys.path.append(str(Path(__file__).parent.parent))
import train_grpo
from train_grpo import ALGORITHMS, Config

NUM_BATCHES = 50
TOLERANCE = 1e-9
STD_EPS = 1e-4  # TRL's
WEIGHT_BOUNDS = {"low": 0.8, "high": 1.1}  # of importance weights: the scripts' are wide for these examples
NUM_GROUPS = 3
GROUP_SIZE = 3  # TRL rounds n / (n - 1) of its stds to fp32: for 3 that is exact
NUM_COMPLETIONS = NUM_GROUPS * GROUP_SIZE
LIMIT = 20  # tokens of a completion
EOS = 0
TOKEN = 3  # every other token
NUM_PROMPT_TOKENS = 2
CASES: dict[str, dict[str, Any]] = {
    **{name: ALGORITHMS[name] for name in ("default", "grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo")},
    "default, batch_std": {"advantage_norm": "batch_std"},
    "grpo, token_truncate": {**ALGORITHMS["grpo"], "correction": "token_truncate"},
    "gspo, token_mask": {**ALGORITHMS["gspo"], "correction": "token_mask"},
    "cispo, sequence_truncate": {**ALGORITHMS["cispo"], "correction": "sequence_truncate"},
    "default, sequence_mask": {"correction": "sequence_mask"},
}


@dataclass(frozen=True)
class Example:
    """The N completions of one step, with M tokens in all. Logprobs are those of the tokens end to end."""

    ids: list[list[int]]
    lengths: list[int]
    new: Tensor  # fp64 [M], under the policy; the gradients are with respect to it
    old: Tensor  # fp64 [M], under the policy before the update
    ref: Tensor  # fp64 [M], under the reference model
    sampled: Tensor  # fp64 [M], under the sampling model
    entropies: Tensor  # fp64 [M], of the policy
    rewards: Tensor  # fp64 [N, 2]


def make_example(seed: int) -> Example:
    """Random completions; each has moved from the old policy by its own step, of 1e-4 to 0.5 per token."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LIMIT + 1, (NUM_COMPLETIONS,), generator=random)
    lengths[:3] = torch.tensor([1, LIMIT, LIMIT])
    lengths.clamp_(max=LIMIT if seed % 2 else LIMIT // 2)  # none is cut off in every second batch
    is_cut = lengths == LIMIT
    is_cut[1] = False  # it ends with a stop token, at the limit
    ids = []
    for length, is_completion_cut in zip(lengths.tolist(), is_cut.tolist(), strict=True):
        last = TOKEN if is_completion_cut else EOS
        ids.append([TOKEN] * (length - 1) + [last])
    num_tokens = int(lengths.sum())
    old, *noise = torch.randn(4, num_tokens, generator=random, dtype=torch.float64)
    old = -old.abs()
    steps = 10 ** (torch.rand(NUM_COMPLETIONS, generator=random, dtype=torch.float64) * 3.7 - 4)
    new = old + steps.repeat_interleave(lengths) * noise[0]
    rewards = torch.randint(0, 3, (NUM_COMPLETIONS, 2), generator=random).double() / 4
    rewards[:GROUP_SIZE] = 0.5
    entropies = torch.rand(num_tokens, generator=random)
    return Example(
        ids,
        lengths.tolist(),
        new=new.requires_grad_(),
        old=old,
        ref=old + 0.3 * noise[1],
        sampled=(old + 0.1 * noise[2]).float().double(),  # TRL takes sampled logprobs as fp32
        entropies=entropies.double().requires_grad_(),  # TRL takes their quantile in fp32
        rewards=rewards,
    )


def make_batch(x: Example) -> tuple[Batch, Tensor]:
    """The example as one packed batch, prompts included, and the new logprobs [T] of its stream."""
    lengths = [NUM_PROMPT_TOKENS + length for length in x.lengths]
    mask = torch.cat([torch.arange(length) >= NUM_PROMPT_TOKENS for length in lengths])
    batch = Batch(
        tuple(lengths),
        tokens=mask.long(),
        loss_mask=mask,
        sample_logprobs=torch.zeros(len(mask)),
        rollout=torch.arange(len(lengths)),
    )
    batch = batch.replace(
        sample_logprobs=batch.scatter(x.sampled),
        old_logprobs=batch.scatter(x.old),
        ref_logprobs=batch.scatter(x.ref),
    )
    return batch, batch.scatter(x.new)


def make_groups(x: Example, rewards: Tensor) -> Groups:
    """The example's rollouts as the groups of a step."""
    num_loss_tokens = torch.tensor(x.lengths)
    table = RolloutTable(
        prompt_ordinal=torch.arange(NUM_COMPLETIONS) // GROUP_SIZE,
        sample=torch.arange(NUM_COMPLETIONS) % GROUP_SIZE,
        branch=torch.zeros(NUM_COMPLETIONS, dtype=torch.int64),
        holder=torch.zeros(NUM_COMPLETIONS, dtype=torch.int64),
        num_prompt_tokens=torch.full((NUM_COMPLETIONS,), NUM_PROMPT_TOKENS),
        num_tokens=num_loss_tokens + NUM_PROMPT_TOKENS,
        num_loss_tokens=num_loss_tokens,
        is_truncated=torch.tensor([ids[-1] != EOS for ids in x.ids]),
        rewards=rewards,
    )
    grouped = rewards.view(NUM_GROUPS, GROUP_SIZE, 2)
    rewarded = RewardedRollouts([], [], [], rewards, torch.zeros(NUM_COMPLETIONS, dtype=torch.bool))
    return Groups(rewarded, table, grouped, grouped[:, :0], torch.ones(2, dtype=torch.float64))


def follow_trl(script: Any) -> None:
    """Give the script or a fork the constants of TRL and of this comparison."""
    script.group_advantages = partial(group_advantages, eps=STD_EPS)
    script.importance_weights = partial(importance_weights, **WEIGHT_BOUNDS)


def minirl_loss(config: Config, x: Example, script: Any = train_grpo) -> Tensor:
    """Run the example through the functions of the script, or of a fork, as its `main` does."""
    batch, new = make_batch(x)
    rewards = x.rewards.clone()
    if config.overlong_buffer:
        penalty = OverlongPenalty(limit=LIMIT, buffer=config.overlong_buffer * LIMIT)
        rewards[:, 1] = torch.tensor(penalty(completion_ids=x.ids))
    groups = make_groups(x, rewards)
    advantages = script.token_advantages(config, groups, batch)
    entropies = batch.scatter(x.entropies)
    if hasattr(script, "has_high_entropy"):
        advantages[~script.has_high_entropy(entropies.detach(), batch.loss_mask)] = 0.0
    if hasattr(script, "top_covariances"):
        is_top = script.top_covariances(batch.replace(advantages=advantages))
        streams = {field.name: getattr(batch, field.name) for field in fields(batch)}
        batch = script.KlCovBatch(**streams, is_top=is_top)
    weights = script.rollout_weights(replace(config, num_minibatches=1), groups, LIMIT).flatten()
    micro = batch.replace(advantages=advantages, loss_weights=batch.spread(weights))
    loss, _ = script.token_loss(config, micro, new, entropies)
    return (micro.loss_weights * loss).sum()


def make_trainer(config: Config, folder: str, **more: Any) -> Any:
    """TRL's trainer with the settings of a preset, and its own."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "per_device_train_batch_size": NUM_COMPLETIONS,
        "num_generations": GROUP_SIZE,
        "num_iterations": 2,  # makes it keep old logprobs
        "max_completion_length": LIMIT,
        "mask_truncated_completions": config.drop_truncated,
        "epsilon": config.clip_low,
        # CISPO's cap is absolute in TRL.
        "epsilon_high": config.clip_high + (1 if config.policy_loss == "cispo" else 0),
    }
    if config.baseline == "leave_one_out":
        trainer_class = RLOOTrainer
        trl_config = RLOOConfig(**settings, beta=config.kl_reward_coef)
    else:
        trainer_class = GRPOTrainer
        trl_config = GRPOConfig(**settings | grpo_settings(config) | more)
    no_rewards = [lambda **kwargs: [], lambda **kwargs: []]
    trainer = trainer_class(
        model=folder,
        reward_funcs=no_rewards,
        args=trl_config,
        train_dataset=Dataset.from_list([{"prompt": "1"}] * NUM_GROUPS),
    )
    # Correct for the sampling model as if it were vLLM's.
    trainer.use_vllm = config.importance_correction != "none"
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def grpo_settings(config: Config) -> dict[str, Any]:
    """The settings that only TRL's GRPO trainer has."""
    loss_types = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
    return {
        "beta": config.kl_coef,
        "use_bias_correction_kl": False,
        "loss_type": "cispo" if config.policy_loss == "cispo" else loss_types[config.loss_norm],
        "scale_rewards": config.advantage_norm.removesuffix("_std"),
        "importance_sampling_level": config.ratio_level.removesuffix("_mean"),
        "vllm_importance_sampling_mode": config.importance_correction,
        "vllm_importance_sampling_clip_min": WEIGHT_BOUNDS["low"],
        "vllm_importance_sampling_clip_max": WEIGHT_BOUNDS["high"],
    }


def trl_loss(trainer: Any, config: Config, x: Example) -> Tensor:
    """TRL's own code from completions to the loss. It gets the example's numbers where it would compute them."""
    from trl.rewards import get_soft_overlong_punishment

    def padded(values: Tensor) -> Tensor:
        return pad_sequence(list(values.split(x.lengths)), batch_first=True)

    def forward(model: Any, *_: Any, compute_entropy: bool = False, **__: Any) -> tuple[Tensor, Tensor, None]:
        if compute_entropy:  # only the forward pass of the loss asks for it
            return padded(x.new), padded(x.entropies), None
        logprobs = padded(x.ref if model is trainer.ref_model else x.old)
        return logprobs, torch.zeros_like(logprobs), None

    def generate(prompts: list[str]) -> tuple[Any, ...]:
        prompt_ids = [[TOKEN] * NUM_PROMPT_TOKENS for _ in prompts]
        texts = ["" for _ in prompts]
        if type(trainer).__name__ == "RLOOTrainer":
            return prompt_ids, x.ids, texts
        sampled = None
        if trainer.use_vllm:
            sampled = [part.tolist() for part in x.sampled.split(x.lengths)]
        return prompt_ids, x.ids, None, texts, sampled, {}, None, None

    rewards = x.rewards.clone()
    if config.overlong_buffer:
        punishment = get_soft_overlong_punishment(LIMIT, int(config.overlong_buffer * LIMIT))
        rewards[:, 1] = torch.tensor(punishment(completion_ids=x.ids))
    trainer._generate = generate
    trainer._get_per_token_logps_and_entropies = forward
    trainer._calculate_rewards = lambda *_: rewards
    inputs = trainer._generate_and_score_completions([{"prompt": "1"}] * NUM_COMPLETIONS)
    return trainer._compute_loss(trainer.model, inputs)


def save_model(folder: str) -> None:
    """A tiny model with a tokenizer: TRL needs one, though its forward pass is replaced."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(Path(folder))


def gradient(x: Example, loss: Tensor) -> Tensor:
    """Of the logprobs and the entropies."""
    inputs = (x.new, x.entropies)
    return torch.cat(torch.autograd.grad(loss, inputs, retain_graph=True, materialize_grads=True))


def compare(name: str, folder: str) -> tuple[float, float]:
    """Greatest relative differences of loss and gradient over all batches."""
    config = Config(**CASES[name])
    trainer = make_trainer(config, folder)
    worst = torch.zeros(2, dtype=torch.float64)
    for seed in range(NUM_BATCHES):
        x = make_example(seed)
        loss, expected_loss = minirl_loss(config, x), trl_loss(trainer, config, x)
        expected_gradient = gradient(x, expected_loss)
        loss_error = (loss - expected_loss).abs() / expected_loss.abs()
        gradient_error = (gradient(x, loss) - expected_gradient).abs().max() / expected_gradient.abs().max()
        worst = torch.maximum(worst, torch.stack([loss_error, gradient_error]).detach())
    return tuple(worst.tolist())


def start_beside_trl() -> str:
    """Join the process group, silence TRL's warnings and return its version. Exits with 2 without TRL."""
    if importlib.util.find_spec("trl") is None:
        print("TRL is not installed: nothing was compared. pip install trl==1.16.0, see the top of this file")
        sys.exit(2)
    import trl
    from transformers.utils.logging import disable_progress_bar

    process_group.start()
    follow_trl(train_grpo)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    disable_progress_bar()
    return trl.__version__


def main() -> None:
    version = start_beside_trl()
    print(f"TRL {version}, float64, {NUM_BATCHES} batches each, tolerance {TOLERANCE:.0e}")
    print(f"{'objective':26} {'batches':>7} {'loss':>9} {'gradient':>9}")
    is_equal = True
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for name in CASES:
            loss, gradient = compare(name, folder)
            is_close = loss <= TOLERANCE and gradient <= TOLERANCE  # false for NaN
            is_equal = is_equal and is_close
            print(f"{name:26} {NUM_BATCHES:7} {loss:9.1e} {gradient:9.1e}", flush=True)
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
