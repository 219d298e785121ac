"""Is each fork of docs/objectives.md the published objective? Compared with TRL's and verl's code, as in objectives.py.

    pip install trl==1.16.0    # the CPU will do
    pip install --no-deps verl==0.9.1 && pip install tensordict==0.10.0 hydra-core codetiming pandas ray
    PYTHONPATH=. python benchmarks/objective_forks.py

verl's side is its functions of advantages, policy losses and KL, on padded tensors. The length penalty is in neither:
it is compared with its formula, a loop over the group. The output has the greatest differences of the losses, which are
about 0.1 to 1, and of their gradients, relative to the greatest of the peer's; "acts" counts the batches in which the
fork's loss is not that of the script. Exits with 1 above the tolerance, with 2 without TRL; without verl its
comparisons are left out.

Conventions that differ, and are made equal here:
- The forks take covariances and entropies once a step, under the policy before its update, and TRL and verl in each
  microbatch, under the new one: here there is one microbatch, and the new policy has sampled. verl's clip-cov leaves
  out tokens that are clipped: here it is in its first update, where none is.
- verl's KL-cov has the coefficient 0.1, and here 1, as in the paper's scripts. It adds 1e-8 to counts that it divides
  by, and holds 1.05 in fp64 for SAPO, where the fork's is fp32, as in TRL.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from objectives import (
    GROUP_SIZE,
    LIMIT,
    NUM_BATCHES,
    NUM_COMPLETIONS,
    STD_EPS,
    Example,
    follow_trl,
    gradient,
    make_batch,
    make_example,
    make_groups,
    make_trainer,
    minirl_loss,
    save_model,
    start_beside_trl,
    trl_loss,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import train_grpo
from support.scripts import load_script, objective_fork
from train_grpo import Config

TOLERANCE = 1e-7
TARGET = 0.5  # of the adaptive entropy, the mean of the examples'
Peer = Callable[[Config, Example], Tensor]  # its loss


@dataclass(frozen=True)
class Case:
    """A fork beside a peer. config: its flags; trl: the arguments of TRL's trainer instead of the fork."""

    name: str
    config: dict[str, Any]
    peer: Peer | None = None
    trl: dict[str, Any] | None = None
    change: Callable[[Example], Example] = lambda x: x


def padded(x: Example, values: Tensor) -> Tensor:
    """Values [M] or [N] as [N, longest]; those of sequences for each of their tokens."""
    if len(values) == len(x.lengths):
        values = values.repeat_interleave(torch.tensor(x.lengths))
    return pad_sequence(list(values.split(x.lengths)), batch_first=True)


def mask_of(x: Example) -> Tensor:
    return padded(x, torch.ones(len(x.new), dtype=torch.float64))


def advantages_of(config: Config, x: Example) -> Tensor:
    """Advantages [N] of the script."""
    batch, _ = make_batch(x)
    stream = train_grpo.token_advantages(config, make_groups(x, x.rewards), batch)
    return stream[batch.last_index]


def loss_of_advantages(config: Config, x: Example, advantages: Tensor) -> Tensor:
    """The script's loss with these advantages [N]."""
    batch, new = make_batch(x)
    weights = train_grpo.rollout_weights(replace(config, num_minibatches=1), make_groups(x, x.rewards), LIMIT)
    micro = batch.replace(advantages=batch.spread(advantages))
    loss, _ = train_grpo.token_loss(config, micro, new, torch.zeros_like(new))
    return (batch.spread(weights.flatten()) * loss).sum()


def verl_policy_loss(config: Config, x: Example, *, name: str, **settings: Any) -> Tensor:
    """verl's loss of this name, with the script's advantages."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    actor = ActorConfig(strategy="fsdp", rollout_n=GROUP_SIZE, use_dynamic_bsz=True)
    of_loss = SimpleNamespace(clip_cov_ratio=2e-4, clip_cov_lb=1.0, clip_cov_ub=5.0)
    of_loss.kl_cov_ratio, of_loss.ppo_kl_coef = 2e-4, 1.0
    settings = {"clip_ratio_low": config.clip_low, "clip_ratio_high": config.clip_high, **settings}
    for field, value in {"policy_loss": of_loss, **settings}.items():
        object.__setattr__(actor, field, value)
    torch.manual_seed(0)  # for clip-cov, whose fork takes the step's first prompt
    streams = [padded(x, values) for values in (x.old, x.new, advantages_of(config, x))]
    return get_policy_loss_fn(name)(*streams, mask_of(x), "token-mean", actor)[0]


def verl_advantages(config: Config, x: Example, *, name: str) -> Tensor:
    """The script's loss with verl's advantages of this name."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    mask = mask_of(x)
    rewards = torch.zeros_like(mask)
    rewards[:, 0] = x.rewards.sum(-1)
    groups = (torch.arange(NUM_COMPLETIONS) // GROUP_SIZE).numpy()
    settings = {"epsilon": STD_EPS, "config": {"norm_adv_by_std_in_grpo": True}}
    advantages, _ = get_adv_estimator_fn(name)(rewards, mask, groups, **settings)
    return loss_of_advantages(config, x, advantages[:, 0])


def verl_kl(config: Config, x: Example) -> Tensor:
    """The script's loss without its KL term, and verl's straight-through one."""
    from verl.trainer.ppo.core_algos import kl_penalty

    without = replace(config, kl_coef=0.0)
    loss = loss_of_advantages(without, x, advantages_of(without, x))
    return loss + config.kl_coef * kl_penalty(x.new, x.ref, "k3+").mean()


def kimi_loss(config: Config, x: Example) -> Tensor:
    """The script's loss with the length reward of arXiv:2501.12599, section 2.3.3, added to the rewards."""
    rewards = x.rewards.clone()
    for first in range(0, NUM_COMPLETIONS, GROUP_SIZE):
        lengths = x.lengths[first : first + GROUP_SIZE]
        shortest, longest = min(lengths), max(lengths)
        for i, length in enumerate(lengths, first):
            if longest > shortest:
                bonus = 0.5 - (length - shortest) / (longest - shortest)
                rewards[i, 1] += bonus if x.rewards[i, 0] > 0 else min(0.0, bonus)
    return loss_of_advantages(config, x, advantages_of(config, replace(x, rewards=rewards)))


def sampled_by_the_new(x: Example) -> Example:
    return replace(x, sampled=x.new.detach())


def in_the_first_update(x: Example) -> Example:
    return replace(x, sampled=x.new.detach(), old=x.new.detach())


def moved_away(x: Example) -> Example:
    """The policy has moved by about the threshold of the off-policy mask."""
    return replace(x, sampled=(x.sampled + 0.5).float().double())


SEQUENCE_MEAN = {"loss_norm": "sequence_mean"}
CASES = [
    Case("SAPO", SEQUENCE_MEAN, trl={"loss_type": "sapo"}),
    Case("SAPO", SEQUENCE_MEAN, partial(verl_policy_loss, name="sapo")),
    Case(
        "GMPO",
        SEQUENCE_MEAN,
        partial(verl_policy_loss, name="geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4),
    ),
    Case("VESPO", {}, trl={"loss_type": "vespo"}),
    Case("OPO", {"advantage_norm": "none"}, partial(verl_advantages, name="opo")),
    Case("pass@k", {}, partial(verl_advantages, name="grpo_passk")),
    Case("Length penalty", {}, kimi_loss),
    Case(
        "Off-policy sequence mask",
        {"correction": "token_truncate"},
        trl={"off_policy_mask_threshold": 0.5},
        change=moved_away,
    ),
    Case("Straight-through KL", {"kl_coef": 0.04}, verl_kl),
    Case("Clip-cov", {}, partial(verl_policy_loss, name="clip_cov"), change=in_the_first_update),
    Case("KL-cov", {}, partial(verl_policy_loss, name="kl_cov"), change=sampled_by_the_new),
    Case("80/20", {}, trl={"top_entropy_quantile": 0.2}),
    Case("Adaptive entropy", {}, trl={"use_adaptive_entropy": True, "entropy_target": TARGET}),
]


def differences(x: Example, loss: Tensor, expected_loss: Tensor) -> Tensor:
    """Of losses, and of gradients relative to the greatest of the expected one [2]."""
    expected_gradient = gradient(x, expected_loss)
    greatest = expected_gradient.abs().max().clamp(min=1e-12)  # a fork may leave no token a gradient
    gradient_error = (gradient(x, loss) - expected_gradient).abs().max() / greatest
    return torch.stack([(loss - expected_loss).abs(), gradient_error]).detach()


def compare(case: Case, folder: str) -> tuple[int, list[float]]:
    """In how many batches the fork acts, and the greatest differences of loss and gradient over all."""
    fork = load_script(objective_fork(Path(folder), case.name))
    follow_trl(fork)
    config = Config(**case.config)
    peer = case.peer
    if case.trl:
        trainer = make_trainer(config, folder, **case.trl)
        trainer.model.train()  # else it adapts no entropy coefficient
        peer = partial(trl_loss, trainer)
    worst, num_changed, coefs = torch.zeros(2, dtype=torch.float64), 0, [0.0, 0.0]
    for seed in range(NUM_BATCHES):
        x = case.change(make_example(seed))
        now = replace(config, entropy_coef=coefs[1])
        if hasattr(fork, "next_entropy_coefs"):
            coefs = fork.next_entropy_coefs(coefs[0], float(x.entropies.mean()), TARGET)
        loss = minirl_loss(now, x, fork)
        worst = torch.maximum(worst, differences(x, loss, peer(config, x)))
        num_changed += bool(differences(x, loss, minirl_loss(config, x)).max() > TOLERANCE)
    return num_changed, worst.tolist()


def main() -> None:
    version = start_beside_trl()
    has_verl = importlib.util.find_spec("verl") is not None
    print(
        f"TRL {version}, verl {'installed' if has_verl else 'missing'}, float64, {NUM_BATCHES} batches each"
    )
    print(f"{'fork':26} {'peer':8} {'acts':>5} {'loss':>9} {'gradient':>9}")
    is_equal = True
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for case in CASES:
            peer = "TRL" if case.trl else "formula" if case.peer is kimi_loss else "verl"
            if peer == "verl" and not has_verl:
                continue
            num_changed, (loss, gradient) = compare(case, folder)
            is_close = loss <= TOLERANCE and gradient <= TOLERANCE  # false for NaN
            is_equal = is_equal and is_close
            print(f"{case.name:26} {peer:8} {num_changed:5} {loss:9.1e} {gradient:9.1e}", flush=True)
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
