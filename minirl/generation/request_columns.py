"""The numbers and tokens of requests that have a row in the cache, as numpy columns indexed by that row."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minirl.generation.block_pool import IntArray, grow_array
from minirl.rollouts import TOKEN, Request, SampledSequence, StopTest, Stream, join_streams, unsampled_stream

# Lengths include the prompt. `length`: the tokens that the host has read; with asynchronous decoding one more may have
# been launched. `max_length`: where the present turn ends. The others are for sampling.
COLUMNS = np.dtype(
    [
        ("length", np.int64),
        ("max_length", np.int64),
        ("key", np.int64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
    ]
)


class RequestColumns:
    """Requests by row: `requests`, their `COLUMNS` [rows], and their tokens, TOKEN [rows, n].

    Only tokens after the prompt are filled in. Rows and n grow when a request needs more.
    """

    def __init__(self, num_rows: int):
        """num_rows: the initial number."""
        self.requests: dict[int, Request] = {}
        self._columns = np.zeros(num_rows, COLUMNS)
        self._tokens = np.zeros((num_rows, 0), TOKEN)
        # The stop ids of all requests so far, and whether any had a stop test: a quick test before each request's own.
        self._stop_ids: frozenset[int] = frozenset()
        self._has_stop_tests = False

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The column of this name, [rows]."""
        return self._columns[name]

    def sampling_params(self, rows: IntArray) -> list[NDArray[Any]]:
        """Keys int64 and temperatures fp32 [n] of these rows.

        Also the fields of `Truncation`, int64 and fp64 [n], if any of these requests may be truncated.
        """
        names = ["key", "temperature"]
        if self["top_k"][rows].any() and self["temperature"][rows].any():
            names += ["top_k", "top_p"]
        return [self[name][rows] for name in names]

    def put_request(self, row: int, request: Request) -> None:
        """Give a request this row, with the tokens that it has so far."""
        num_prompt_tokens = len(request.prompt_ids)
        length = num_prompt_tokens + len(request.sampled)
        max_length = num_prompt_tokens + request.max_new_tokens
        self._columns = grow_array(self._columns, row + 1)
        # Memory that is never written takes no pages.
        self._tokens = grow_array(self._tokens, row + 1, max_length)
        self._tokens[row, num_prompt_tokens:length] = request.sampled
        self.requests[row] = request
        # In the order of COLUMNS.
        self._columns[row] = (length, max_length, request.rng_key, request.temperature, *request.truncation)
        self._stop_ids |= request.stop_ids
        self._has_stop_tests |= request.stop_test is not None

    def append(self, rows: IntArray, tokens: Stream) -> dict[int, str]:
        """Append a token TOKEN [n] to each of these requests; returns why those ended that it ends, by row."""
        lengths = self["length"][rows]
        self._tokens[rows, lengths] = tokens
        self["length"][rows] = lengths + 1
        may_end = lengths + 1 >= self["max_length"][rows]
        may_end |= np.isin(tokens["id"], list(self._stop_ids))
        stopped: set[int] = set()
        if self._has_stop_tests:
            stopped = self._rows_stopped_by_test(rows.tolist())
            may_end |= np.isin(rows, list(stopped))
        reasons: dict[int, str] = {}
        for row, token in zip(rows[may_end].tolist(), tokens["id"][may_end].tolist(), strict=True):
            if row in stopped or token in self.requests[row].stop_ids:
                reasons[row] = "stop"
            elif self["length"][row] >= self["max_length"][row]:
                reasons[row] = "length"
        return reasons

    def tokens(self, row: int, start: int) -> Stream:
        """A request's tokens from `start` on, which is not in its prompt; a view."""
        return self._tokens[row, start : self["length"][row]]

    def requeued_request(self, row: int) -> Request:
        """The request with the tokens that it has so far, to be queued again."""
        request = self.requests[row]
        return replace(request, sampled=self.tokens(row, len(request.prompt_ids)).copy())

    def finished_sequence(self, row: int, finish_reason: str) -> SampledSequence:
        """A copy of the finished sequence."""
        request = self.requests[row]
        num_prompt_tokens = len(request.prompt_ids)
        return SampledSequence(
            stream=join_streams(unsampled_stream(request.prompt_ids), self.tokens(row, num_prompt_tokens)),
            num_prompt_tokens=num_prompt_tokens,
            rollout_id=request.rollout_id,
            finish_reason=finish_reason,
            temperature=request.temperature,
        )

    def _rows_stopped_by_test(self, rows: Sequence[int]) -> set[int]:
        """The rows whose stop tests end their turn. Asks each test once."""
        rows_with_test: dict[StopTest, list[int]] = {}
        for row in rows:
            test = self.requests[row].stop_test
            if test is not None:
                rows_with_test.setdefault(test, []).append(row)
        stopped: set[int] = set()
        for test, tested in rows_with_test.items():
            turns = []
            for row in tested:
                request = self.requests[row]
                ids = self.tokens(row, len(request.prompt_ids) + request.turn_start)["id"]
                turns.append(ids[-test.max_tokens :].tolist())
            stopped.update(itertools.compress(tested, test(turns)))
        return stopped
