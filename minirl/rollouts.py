"""What goes through a step: requests, the tokens sampled for them, and finished rollouts. Token ids, on the host."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class RolloutId:
    """Which rollout of the run: the `prompt`-th prompt served since its start, and the `sample`-th of its group."""

    prompt_ordinal: int
    sample: int


class Sampled(NamedTuple):
    """One sampled token, its logprob at the sampling temperature and the version of the weights it came from."""

    token: int
    logprob: float
    weight_version: int


@dataclass(frozen=True)
class Request:
    """One rollout to make. `sampled` is what an earlier phase has sampled of it (see `Engine.abort`)."""

    prompt_ids: tuple[int, ...]
    rollout_id: RolloutId
    key: int  # `sampling.request_key`
    max_new_tokens: int
    temperature: float  # 0: the likeliest token
    stop_ids: frozenset[int]
    sampled: tuple[Sampled, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """One prompt with one completion as one aligned stream of L tokens (host tensors)."""

    tokens: Tensor  # int64 [L]
    loss_mask: Tensor  # bool [L]: the policy sampled this token
    sample_logprobs: Tensor  # fp32 [L], by the engine when sampling; 0 where loss_mask is false
    weight_version: Tensor  # int32 [L], optimizer steps behind the weights that sampled the token
    num_prompt_tokens: int
    rollout_id: RolloutId
    finish_reason: str  # "stop" or "length"

    @property
    def completion(self) -> list[int]:
        """The sampled token ids, the stop token included."""
        return self.tokens[self.num_prompt_tokens :].tolist()
