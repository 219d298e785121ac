"""What the engine keeps of a request until it is a rollout, and of sampled tokens until the host has read them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minirl.generation.kv_cache import CachedSequence
from minirl.rollouts import Request, Rollout, Sampled


@dataclass(eq=False)
class RunningRequest:
    """A request in the decode batch. The cache holds all its tokens but the last launched one.

    `sampled` are the tokens that were read; `place` is where the engine's last tokens on the device have this row's.
    """

    request: Request
    cached: CachedSequence
    sampled: list[Sampled] = field(default_factory=list)
    place: int = 0

    @property
    def num_launched(self) -> int:
        """How many tokens were sampled, read or not."""
        return self.cached.length - len(self.request.prompt_ids) + 1

    @property
    def finish_reason(self) -> str | None:
        """Why it is at its end, as far as its tokens were read."""
        if self.sampled and self.sampled[-1].token in self.request.stop_ids:
            return "stop"
        return "length" if len(self.sampled) >= self.request.max_new_tokens else None

    def unfinished(self) -> Request:
        """The request with what was read of it, to be submitted again."""
        return replace(self.request, sampled=tuple(self.sampled))

    def rollout(self) -> Rollout:
        """The finished rollout."""
        assert self.finish_reason is not None, "the row goes on"
        prompt = self.request.prompt_ids
        tokens, logprobs, versions = zip(*self.sampled, strict=True)
        zeros = [0] * len(prompt)
        return Rollout(
            tokens=torch.tensor([*prompt, *tokens]),
            loss_mask=torch.tensor([*map(bool, zeros), *(True for _ in tokens)]),
            sample_logprobs=torch.tensor([*zeros, *logprobs], dtype=torch.float32),
            weight_version=torch.tensor([*zeros, *versions], dtype=torch.int32),
            num_prompt_tokens=len(prompt),
            rollout_id=self.request.rollout_id,
            finish_reason=self.finish_reason,
        )


class PendingTokens:
    """One sampled token of each of some rows, on its way to the host."""

    def __init__(self, rows: list[RunningRequest], tokens: Tensor, logprobs: Tensor, *, weight_version: int):
        self.rows, self.weight_version = rows, weight_version
        self._tokens, self._logprobs = (
            x.to("cpu", non_blocking=True) for x in (tokens, logprobs)
        )  # pinned memory
        self._arrived = torch.cuda.Event() if tokens.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> None:
        """Wait for the tokens, and for what was launched before them."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def read(self) -> Iterator[tuple[RunningRequest, Sampled]]:
        """Wait for the tokens, not for what was launched after them."""
        self.wait()
        for row, token, logprob in zip(
            self.rows, self._tokens.tolist(), self._logprobs.tolist(), strict=True
        ):
            yield row, Sampled(token, logprob, self.weight_version)
