"""The requests that are being decoded, and sampled tokens while they are on their way to the host."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.rollouts import (
    NO_TOKENS,
    Completion,
    Request,
    Rollout,
    StopTest,
    rollout_of,
    token_tensor,
)


class RunningRequests:
    """The requests in the decode batch, as arrays: a step costs the host a few operations on whole columns.

    A request has the row of its sequence in the cache, which holds all its tokens except the newest one.

    rows int64 [n]: the rows of the running requests, oldest first. The other arrays are indexed by row:
    prompt_lengths, limits int64: tokens of the prompt, and `max_new_tokens` of the present turn
    keys int64, temperatures fp32; top_ks int64, top_ps fp64 (the fields of `Truncation`): for sampling
    past_requests int64: how many requests had this row before, to tell their unread tokens from the present one's
    token_index int64: the index of its newest token among those that the engine keeps on the device
    counts int64: how many tokens after the prompt the host has read. With asynchronous decoding one more may have been
    launched, that is, its computation has been queued on the device.
    Requests that wait for their next turn keep their row, too, but are not in `rows`. The arrays grow with the rows.
    """

    def __init__(self, num_rows: int, make_stop_test: Callable[[tuple[str, ...]], StopTest] | None):
        """num_rows: the initial number. make_stop_test: see `Engine`."""
        self._make_stop_test = make_stop_test
        self.rows = torch.arange(0)
        self.requests: dict[int, Request] = {}
        self.prompt_lengths = torch.zeros(num_rows, dtype=torch.int64)
        self.limits = torch.zeros(num_rows, dtype=torch.int64)
        self.keys = torch.zeros(num_rows, dtype=torch.int64)
        self.temperatures = torch.zeros(num_rows)
        self.top_ks = torch.zeros(num_rows, dtype=torch.int64)
        self.top_ps = torch.zeros(num_rows, dtype=torch.float64)
        self.token_index = torch.zeros(num_rows, dtype=torch.int64)
        self.counts = torch.zeros(num_rows, dtype=torch.int64)
        self.past_requests = torch.zeros(num_rows, dtype=torch.int64)
        # Matrices [rows, columns] of the tokens after the prompt that were read; each row has `counts` of them.
        self._read = Completion(*(stream.expand(num_rows, 0) for stream in vars(NO_TOKENS).values()))
        # The stop tokens of all requests so far, and whether one had stop strings; each request has its own.
        self._stop_ids: frozenset[int] = frozenset()
        self._has_stop_strings = False

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def last_lengths(self) -> Tensor:
        """The length in the cache at which each running request's last token is launched, int64 [n]."""
        return self.prompt_lengths[self.rows] + self.limits[self.rows] - 1

    def lengths(self, rows: Tensor) -> Tensor:
        """How many tokens each request has, prompt included, without unread ones; rows and result int64 [n]."""
        return self.prompt_lengths[rows] + self.counts[rows]

    def sampling(self, rows: Tensor) -> list[Tensor]:
        """Keys and temperatures of these rows and, if a truncated one may be among them, the fields of truncations."""
        temperatures, top_ks = self.temperatures[rows], self.top_ks[rows]
        tensors = [self.keys[rows], temperatures]
        if top_ks.any() and temperatures.any():
            tensors += [top_ks, self.top_ps[rows]]
        return tensors

    def admit(self, request: Request, row: int) -> None:
        """Give a request a row, with the tokens that it has so far. The next turn of one that has a row replaces it."""
        self._make_room(row, request.max_new_tokens)
        self.requests[row] = request
        self.prompt_lengths[row] = len(request.prompt_ids)
        self.limits[row] = request.max_new_tokens
        self.keys[row] = request.key
        self.temperatures[row] = request.temperature
        self.top_ks[row], self.top_ps[row] = request.truncation
        count = len(request.sampled)
        self.counts[row] = count
        if count:
            for name, stream in vars(request.sampled).items():
                getattr(self._read, name)[row, :count] = stream
        self._stop_ids |= request.stop_ids
        self._has_stop_strings |= bool(request.stop)

    def run(self, rows: Tensor) -> None:
        """Start the requests in these rows int64 [n], as the youngest ones."""
        self.rows = torch.cat([self.rows, rows])

    def pause(self, row: int) -> None:
        """Stop the request in this row. Its launched tokens will not be read."""
        self.rows = self.rows[self.rows != row]
        self.past_requests[row] += 1

    def remove(self, row: int) -> None:
        """Stop and forget the request in this row."""
        self.pause(row)
        del self.requests[row]

    def tokens_after(self, row: int, length: int) -> Tensor:
        """The tokens of a request after the first `length`, which include the prompt; int64."""
        return self._read.tokens[row, length - int(self.prompt_lengths[row]) : self.counts[row]]

    def read(self, pending: "PendingTokens") -> dict[int, str]:
        """Wait for the tokens, then give each request its own; returns the rows of those that end with it, and why.

        With asynchronous decoding, a request's previous token may have been its last: then this one is dropped.
        """
        tokens, logprobs = pending.read()
        is_wanted = self.past_requests[pending.rows] == pending.past_requests
        rows = pending.rows[is_wanted]
        tokens = tokens[is_wanted]
        index = self.counts[rows]
        self._read.tokens[rows, index] = tokens
        self._read.logprobs[rows, index] = logprobs[is_wanted]
        self._read.weight_versions[rows, index] = pending.weight_version
        self._read.is_sampled[rows, index] = True
        self.counts[rows] += 1
        is_full = self.counts[rows] >= self.limits[rows]
        may_end = is_full | torch.isin(tokens, torch.tensor(list(self._stop_ids), dtype=torch.int64))
        stopped: list[int] = []
        if self._has_stop_strings:
            stopped = self._stopped_by_string(rows.tolist())
            may_end |= torch.isin(rows, torch.tensor(stopped, dtype=torch.int64))
        reasons: dict[int, str] = {}
        candidates = (rows[may_end].tolist(), tokens[may_end].tolist(), is_full[may_end].tolist())
        for row, token, has_all in zip(*candidates, strict=True):
            if row in stopped or token in self.requests[row].stop_ids:
                reasons[row] = "stop"
            elif has_all:
                reasons[row] = "length"
        return reasons

    def unfinished(self, row: int) -> Request:
        """The request with the tokens that it has so far, to be queued again."""
        return replace(self.requests[row], sampled=NO_TOKENS + self._completion(row))  # a copy

    def rollout(self, row: int, finish_reason: str) -> Rollout:
        """The finished rollout."""
        request = self.requests[row]
        prompt = token_tensor(request.prompt_ids)
        return rollout_of(
            request.rollout_id,
            prompt,
            self._completion(row),
            finish_reason,
            temperature=request.temperature,
        )

    def _stopped_by_string(self, rows: Sequence[int]) -> list[int]:
        """Return the rows whose stop strings end their turn. Asks the test of the same strings once."""
        rows_of: dict[tuple[str, ...], list[int]] = {}
        for row in rows:
            strings = self.requests[row].stop
            if strings:
                rows_of.setdefault(strings, []).append(row)
        stopped: list[int] = []
        for strings, tested in rows_of.items():
            assert self._make_stop_test is not None, "stop strings need Engine(make_stop_test=...)"
            test = self._make_stop_test(strings)
            ends = self.counts[tested]
            columns = ends[:, None] + torch.arange(-test.max_tokens, 0)
            tails = self._read.tokens[torch.tensor(tested)[:, None], columns.clamp(min=0)].tolist()
            # How many tokens of each tail came before the turn.
            starts = torch.tensor([self.requests[row].turn_start for row in tested])
            befores = (starts + test.max_tokens - ends).clamp(min=0).tolist()
            turns = [tail[before:] for tail, before in zip(tails, befores, strict=True)]
            stopped += itertools.compress(tested, test(turns))
        return stopped

    def _completion(self, row: int) -> Completion:
        """The tokens read so far; they share this object's memory."""
        return self._read[row, : int(self.counts[row])]

    def _make_room(self, row: int, num_columns: int) -> None:
        """Grow the arrays if they lack this row, and the matrices if they have fewer columns."""
        num_rows, num_old_columns = self._read.tokens.shape
        if row < num_rows and num_columns <= num_old_columns:
            return
        # Twice as many, so that slowly growing turns do not copy the matrices each time.
        if row >= num_rows:
            num_rows = max(row + 1, 2 * num_rows)
        if num_columns > num_old_columns:
            num_columns = max(num_columns, 2 * num_old_columns)
        num_columns = max(num_columns, num_old_columns)
        for name, array in vars(self).items():
            if isinstance(array, Tensor) and name != "rows":
                setattr(self, name, F.pad(array, (0, num_rows - len(array))))
        num_used = int(self.counts.max())
        grown = []
        for old in vars(self._read).values():
            # Not zeros: memory that is never written takes no pages.
            new = old.new_empty(num_rows, num_columns)
            new[: len(old), :num_used] = old[:, :num_used]
            grown.append(new)
        self._read = Completion(*grown)


class PendingTokens:
    """One sampled token of each of B running requests, on its way to the host."""

    def __init__(self, rows: Tensor, past_requests: Tensor, sampled: Tensor, weight_version: int):
        """Start the copy. It does not wait for the device."""
        self.rows = rows
        self.past_requests = past_requests
        self.weight_version = weight_version
        # From CUDA the copy goes to pinned memory, so it runs while the host continues.
        self._sampled = sampled.to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if sampled.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> None:
        """Wait for the copy and all work launched before it, but not for later work."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def read(self) -> tuple[Tensor, Tensor]:
        """Wait for the copy; returns tokens int64 [B] and logprobs fp32 [B]."""
        self.wait()
        tokens, logprobs = self._sampled
        return tokens.long(), logprobs.view(torch.float32)
