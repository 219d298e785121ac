"""The parameters and tokens of requests in the cache, as numpy columns indexed by cache row."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minirl.generation.block_pool import IntArray, grow_array
from minirl.rollouts import (
    TOKEN,
    Request,
    SampledSequence,
    StopTest,
    Stream,
    concat_tokens,
    make_token_stream,
)

# Lengths include the prompt. `length`: number of tokens that the host has read; asynchronous decoding may have launched
# one more token. `max_length`: length limit for the current turn. The other columns are sampling parameters.
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
    """The requests in the cache, keyed by row: the requests themselves, their `COLUMNS` [rows], and their tokens, TOKEN
    [rows, n].

    Only tokens after the prompt are stored. The arrays grow as requests need more rows or tokens.
    """

    def __init__(self, num_rows: int):
        """num_rows: initial number of rows."""
        self.requests: dict[int, Request] = {}
        self._columns = np.zeros(num_rows, COLUMNS)
        self._tokens = np.zeros((num_rows, 0), TOKEN)
        # All stop tokens seen so far, and whether any request so far has a `StopTest`. `append_tokens` uses these two
        # fields to skip most rows.
        self._stop_ids: frozenset[int] = frozenset()
        self._has_stop_tests = False

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return the column with this name, [rows]."""
        return self._columns[name]

    def sampling_params(self, rows: IntArray) -> list[NDArray[Any]]:
        """Return these rows' RNG keys, int64 [n], and temperatures, fp32 [n].

        If any of these requests uses truncated sampling, also return top_k, int64 [n], and top_p, fp64 [n].
        """
        column_names = ["key", "temperature"]
        if self["top_k"][rows].any() and self["temperature"][rows].any():
            column_names += ["top_k", "top_p"]
        return [self[name][rows] for name in column_names]

    def put_request(self, row: int, request: Request) -> None:
        """Store a request and its tokens so far in this row."""
        num_prompt_tokens = len(request.prompt_ids)
        length = num_prompt_tokens + len(request.sampled)
        max_length = num_prompt_tokens + request.max_new_tokens
        self._columns = grow_array(self._columns, row + 1)
        # The unused part of the array takes no memory, because the operating system allocates only pages that are
        # written.
        self._tokens = grow_array(self._tokens, row + 1, max_length)
        self._tokens[row, num_prompt_tokens:length] = request.sampled
        self.requests[row] = request
        # The values are in the order of COLUMNS.
        self._columns[row] = (length, max_length, request.rng_key, request.temperature, *request.truncation)
        self._stop_ids |= request.stop_ids
        self._has_stop_tests |= request.stop_test is not None

    def append_tokens(self, rows: IntArray, tokens: Stream) -> dict[int, str]:
        """Append one token, TOKEN [n], to each of n requests.

        Return the finish reasons of the requests that ended, keyed by row.
        """
        lengths = self["length"][rows]
        self._tokens[rows, lengths] = tokens
        self["length"][rows] = lengths + 1
        may_end = lengths + 1 >= self["max_length"][rows]
        may_end |= np.isin(tokens["id"], list(self._stop_ids))
        stopped_rows: set[int] = set()
        if self._has_stop_tests:
            stopped_rows = self._rows_stopped_by_test(rows.tolist())
            may_end |= np.isin(rows, list(stopped_rows))
        finish_reasons: dict[int, str] = {}
        for row, token in zip(rows[may_end].tolist(), tokens["id"][may_end].tolist(), strict=True):
            if row in stopped_rows or token in self.requests[row].stop_ids:
                finish_reasons[row] = "stop"
            elif self["length"][row] >= self["max_length"][row]:
                finish_reasons[row] = "length"
        return finish_reasons

    def tokens(self, row: int, start: int) -> Stream:
        """Return a view of a request's tokens from `start` on. `start` must lie after the prompt."""
        return self._tokens[row, start : self["length"][row]]

    def requeued_request(self, row: int) -> Request:
        """Return a copy of the request for requeueing, with all tokens sampled so far."""
        request = self.requests[row]
        return replace(request, sampled=self.tokens(row, len(request.prompt_ids)).copy())

    def finished_sequence(self, row: int, finish_reason: str) -> SampledSequence:
        """Return a copy of the finished sequence of the request in this row."""
        request = self.requests[row]
        num_prompt_tokens = len(request.prompt_ids)
        return SampledSequence(
            stream=concat_tokens(make_token_stream(request.prompt_ids), self.tokens(row, num_prompt_tokens)),
            num_prompt_tokens=num_prompt_tokens,
            rollout_id=request.rollout_id,
            finish_reason=finish_reason,
            temperature=request.temperature,
        )

    def _rows_stopped_by_test(self, rows: Sequence[int]) -> set[int]:
        """Return the rows whose turns are ended by a stop test. Call each distinct stop test only once."""
        rows_with_test: dict[StopTest, list[int]] = {}
        for row in rows:
            stop_test = self.requests[row].stop_test
            if stop_test is not None:
                rows_with_test.setdefault(stop_test, []).append(row)
        stopped_rows: set[int] = set()
        for stop_test, tested_rows in rows_with_test.items():
            turn_token_ids = []
            for row in tested_rows:
                request = self.requests[row]
                ids = self.tokens(row, len(request.prompt_ids) + request.turn_start)["id"]
                turn_token_ids.append(ids[-stop_test.max_tokens :].tolist())
            stopped_rows.update(itertools.compress(tested_rows, stop_test(turn_token_ids)))
        return stopped_rows
