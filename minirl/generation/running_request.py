"""A request while it is being decoded, and sampled tokens while they are on their way to the host."""

from array import array
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minirl.generation.kv_cache import CachedSequence
from minirl.rollouts import Request, Rollout, Sampled


@dataclass(eq=False)
class RunningRequest:
    """A request in the decode batch. The cache holds all its tokens except the newest one.

    `tokens`, with their `logprobs` and `weight_versions`, are the sampled ones that were copied to the host already.
    With asynchronous decoding one more may have been launched, that is, its computation has been queued on the
    device. `token_index` is the index of this request's newest token in the engine's `_newest_tokens` on the device.
    `finish_reason` says why the request has ended ("stop" or "length"), by the tokens read so far.
    """

    request: Request
    cached: CachedSequence
    token_index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        # The length in the cache at which the last token is launched.
        self.last_length = len(self.request.prompt_ids) + self.request.max_new_tokens - 1
        for token, logprob, weight_version in self.request.sampled:
            self.append(token, logprob, weight_version)

    def append(self, token: int, logprob: float, weight_version: int) -> None:
        """Add a sampled token that was read."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.weight_versions.append(weight_version)
        if token in self.request.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.request.max_new_tokens:
            self.finish_reason = "length"

    @property
    def num_launched(self) -> int:
        """How many tokens have been launched, whether the host has read them or not."""
        num_cached_after_prompt = self.cached.length - len(self.request.prompt_ids)
        return num_cached_after_prompt + 1  # the newest token is not in the cache yet

    def unfinished(self) -> Request:
        """The request with the tokens sampled so far, to be submitted again."""
        sampled = map(Sampled, self.tokens, self.logprobs, self.weight_versions)
        return replace(self.request, sampled=tuple(sampled))

    def rollout(self) -> Rollout:
        """The finished rollout."""
        assert self.finish_reason is not None, "the request is not finished"
        num_prompt_tokens = len(self.request.prompt_ids)
        num_tokens = num_prompt_tokens + len(self.tokens)
        # Through an array: ten times as fast as torch.tensor of a long tuple.
        prompt = torch.frombuffer(array("q", self.request.prompt_ids), dtype=torch.int64)
        sample_logprobs = torch.zeros(num_tokens)
        sample_logprobs[num_prompt_tokens:] = torch.tensor(self.logprobs)
        weight_version = torch.zeros(num_tokens, dtype=torch.int32)
        weight_version[num_prompt_tokens:] = torch.tensor(self.weight_versions)
        return Rollout(
            tokens=torch.cat([prompt, torch.tensor(self.tokens)]),
            loss_mask=torch.arange(num_tokens) >= num_prompt_tokens,
            sample_logprobs=sample_logprobs,
            weight_version=weight_version,
            num_prompt_tokens=num_prompt_tokens,
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

    def read(self) -> list[RunningRequest]:
        """Wait for the copies, then give each request its token; returns those that end with it.

        With asynchronous decoding a request may have ended with the token before: then this one is dropped.
        """
        self.wait()
        finished: list[RunningRequest] = []
        tokens = self._tokens.tolist()
        logprobs = self._logprobs.tolist()
        for request, token, logprob in zip(self.requests, tokens, logprobs, strict=True):
            if request.finish_reason is None:
                request.append(token, logprob, self.weight_version)
                if request.finish_reason is not None:
                    finished.append(request)
        return finished
