"""A request while it is being decoded, and sampled tokens while they are on their way to the host."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minirl.generation.kv_cache import CachedSequence
from minirl.rollouts import Request, Rollout, Sampled


@dataclass(eq=False)
class RunningRequest:
    """A request in the decode batch. The cache holds all its tokens except the newest one.

    `sampled` are the tokens already copied to the host. With asynchronous decoding one more may have been
    launched, that is, its computation has been queued on the device. `token_index` is the index of this
    request's newest token in the engine's `_newest_tokens` on the device.
    """

    request: Request
    cached: CachedSequence
    sampled: list[Sampled] = field(default_factory=list)
    token_index: int = 0

    @property
    def num_launched(self) -> int:
        """How many tokens have been launched, whether the host has read them or not."""
        num_cached_after_prompt = self.cached.length - len(self.request.prompt_ids)
        return num_cached_after_prompt + 1  # the newest token is not in the cache yet

    @property
    def finish_reason(self) -> str | None:
        """Why the request has ended ("stop" or "length"), or None. Based on the tokens already read."""
        if self.sampled and self.sampled[-1].token in self.request.stop_ids:
            return "stop"
        if len(self.sampled) >= self.request.max_new_tokens:
            return "length"
        return None

    def unfinished(self) -> Request:
        """The request with the tokens sampled so far, to be submitted again."""
        return replace(self.request, sampled=tuple(self.sampled))

    def rollout(self) -> Rollout:
        """The finished rollout."""
        assert self.finish_reason is not None, "the request is not finished"
        prompt_ids = self.request.prompt_ids
        tokens, logprobs, versions = zip(*self.sampled, strict=True)
        zeros = [0] * len(prompt_ids)
        is_sampled = [False] * len(prompt_ids) + [True] * len(tokens)
        return Rollout(
            tokens=torch.tensor([*prompt_ids, *tokens]),
            loss_mask=torch.tensor(is_sampled),
            sample_logprobs=torch.tensor([*zeros, *logprobs], dtype=torch.float32),
            weight_version=torch.tensor([*zeros, *versions], dtype=torch.int32),
            num_prompt_tokens=len(prompt_ids),
            rollout_id=self.request.rollout_id,
            finish_reason=self.finish_reason,
        )


class PendingTokens:
    """One sampled token of each of B running requests, on its way to the host."""

    def __init__(
        self, requests: list[RunningRequest], tokens: Tensor, logprobs: Tensor, *, weight_version: int
    ):
        """Start copying tokens int64 [B] and logprobs fp32 [B] to the host. Does not wait for the device."""
        self.requests = requests
        self.weight_version = weight_version
        # From CUDA these copies go to pinned memory, so they run while the host continues.
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._logprobs = logprobs.to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> None:
        """Wait for the copies and all work launched before them, but not for what was launched after."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def read(self) -> Iterator[tuple[RunningRequest, Sampled]]:
        """Wait for the copies, then yield each request with its token."""
        self.wait()
        tokens = self._tokens.tolist()
        logprobs = self._logprobs.tolist()
        for request, token, logprob in zip(self.requests, tokens, logprobs, strict=True):
            yield request, Sampled(token, logprob, self.weight_version)
