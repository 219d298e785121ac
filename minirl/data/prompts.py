"""The prompt stream: draws rows in an order that depends only on (seed, epoch), and creates engine requests."""

import copy
import dataclasses
import functools
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from minirl.data.answers import check_calls_parsable
from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.messages import Messages, Prompt, is_token_ids, read_prompt
from minirl.data.task import Row
from minirl.errors import refuse
from minirl.generation.sampling import request_key
from minirl.ranks.process_group import rank, world_size
from minirl.rollouts import NO_TRUNCATION, Request, RolloutId, Truncation


class PromptStream:
    """A task's prompts in endless shuffled epochs. Prompts that are too long are skipped.

    `prompt_ordinal` numbers the prompts drawn over the whole run. A prompt's row is a pure function of (seed,
    prompt_ordinal). Prompts are tokenized when they are drawn.

    prompt_lengths: number of tokens in each prompt, in the order of the rows. row_index: function that maps a
    prompt_ordinal to the index of the prompt's row. A curriculum may assign another function, which must keep returning
    the same index for as long as the prompt is in use: throughout a step, and after a resume.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: ChatTokenizer,
        *,
        purpose: str,
        max_tokens: int,
        max_new_tokens: int,
        seed: int = 0,
        notes: Sequence[str] = (),
    ):
        """Tokenize all rows once, to check prompts and to measure their lengths.

        purpose: see `sampling.request_key`. max_tokens: maximum length of a prompt plus its completion. notes: the
        caller's notes on the rows, for the log.

        Skips prompts that leave fewer than `max_new_tokens` tokens for the completion. Raises InputError, naming the
        rows and flags, if a row is invalid or no row remains.
        """
        self.tokenizer = tokenizer
        self.purpose = purpose
        self.seed = seed
        self.max_tokens = max_tokens
        self.max_new_tokens = max_new_tokens
        rows = [_read_row(row) for row in rows]
        lengths = [len(ids) for ids in tokenizer.encode_all(rows)]
        max_prompt_tokens = max_tokens - max_new_tokens
        self._rows = [row for row, length in zip(rows, lengths, strict=True) if length <= max_prompt_tokens]
        self.prompt_lengths = [length for length in lengths if length <= max_prompt_tokens]
        self._notes = tokenizer.template_notes(rows[0].prompt) if rows else []
        if len(self._rows) < len(rows):
            self._notes.append(self._note_on_long_prompts(rows, lengths, max_prompt_tokens))
        self._notes += notes
        self.row_index: Callable[[int], int] = self._shuffled_index

    @property
    def num_prompts(self) -> int:
        """The number of prompts in an epoch."""
        return len(self._rows)

    def notes(self, *, per_step: int = 0) -> list[str]:
        """Return notes on unusual rows.

        per_step: number of prompts per training step; 0 if the stream is not for training.
        """
        notes = list(self._notes)
        if self.num_prompts < per_step:
            notes.append(
                f"a step takes {per_step} prompts but there are only {self.num_prompts}, so some repeat"
            )
        return [f"{self.purpose}: {note}" for note in notes]

    def requests(
        self,
        ordinals: Iterable[int],
        *,
        group_size: int,
        temperature: float = 1.0,
        num_greedy: int = 0,
        truncation: Truncation = NO_TRUNCATION,
    ) -> list[Request]:
        """Return this rank's requests for these prompts.

        Not collective. Each prompt has a group of `group_size` requests, followed by `num_greedy` greedy requests. A
        rank gets whole groups, so a prompt is prefilled only once, and all rollouts that a reward may compare are on
        one rank. Prompts are assigned to ranks round-robin by ordinal, which keeps ranks balanced even if each call is
        for one prompt.
        """
        requests = []
        for prompt_ordinal in ordinals:
            if prompt_ordinal % world_size() != rank():
                continue
            row = self._rows[self.row_index(prompt_ordinal)]
            prompt_ids = tuple(self.tokenizer.encode(row))
            for sample in range(group_size + num_greedy):
                rollout_id = RolloutId(prompt_ordinal, sample)
                request_temperature = temperature if sample < group_size else 0.0
                requests.append(
                    self.request(rollout_id, row.prompt, prompt_ids, request_temperature, truncation)
                )
        return requests

    def branch_request(
        self,
        first: Request,
        branch: int,
        prompt: Prompt,
        origin: str,
        *,
        tools: list[dict[str, Any]] | None,
    ) -> Request:
        """Return the request for a later branch of a rollout. first: the request for the rollout's first branch.

        The request's `max_new_tokens` is below 1 if the prompt is too long. tools: the tools that a chat prompt
        includes; None means the tokenizer's tools. Raises InputError, naming `origin`, if the prompt is unusable, if
        the chat template does not render the tools, or if calls to the tools cannot be parsed.
        """
        origin = f"{origin}: branch(...)"
        if is_token_ids(prompt):
            self.tokenizer.check_ids(prompt, origin)
            prompt_ids = tuple(prompt)
        else:
            tokenizer = self.tokenizer.with_tools(tools)
            prompt_ids = tuple(tokenizer.encode(Row(cast(str | Messages, prompt), {}, origin)))
            if tools and tokenizer is not self.tokenizer:
                check_calls_parsable(tokenizer)
        rollout_id = first.rollout_id._replace(branch=branch)
        return self.request(rollout_id, prompt, prompt_ids, first.temperature, first.truncation)

    def request(
        self,
        rollout_id: RolloutId,
        prompt: Prompt,
        prompt_ids: tuple[int, ...],
        temperature: float,
        truncation: Truncation,
    ) -> Request:
        """Return the request for one branch of a rollout, given its prompt ids. Not collective."""
        return Request(
            prompt_ids=prompt_ids,
            rollout_id=rollout_id,
            rng_key=self.rng_key(rollout_id),
            max_new_tokens=min(self.max_new_tokens, self.max_tokens - len(prompt_ids)),
            temperature=temperature,
            stop_ids=self.tokenizer.stop_ids_of(prompt),
            truncation=truncation,
        )

    def rng_key(self, rollout_id: RolloutId) -> int:
        """Return a rollout's RNG key; see `sampling.request_key`."""
        return request_key(self.seed, purpose=self.purpose, **rollout_id._asdict())

    def row(self, prompt_ordinal: int) -> Row:
        """Return a copy of a prompt's row; the caller may modify the copy."""
        row = self._rows[self.row_index(prompt_ordinal)]
        # `copy.deepcopy(row)` takes twice as long.
        return type(row)(*map(copy.deepcopy, vars(row).values()))

    def _shuffled_index(self, prompt_ordinal: int) -> int:
        epoch, position = divmod(prompt_ordinal, self.num_prompts)
        return _shuffled_order(self.num_prompts, self.seed, epoch)[position]

    def _note_on_long_prompts(self, rows: Sequence[Row], lengths: Sequence[int], limit: int) -> str:
        """Return a note about rows with prompts longer than `limit`. Raises InputError if all rows are skipped."""
        refuse(
            min(lengths) > limit,
            f"every prompt is too long: the shortest has {min(lengths)} tokens, but with --max-new-tokens "
            f"{self.max_new_tokens}, only {limit} remain of the {self.max_tokens} that the model, --cache-tokens and "
            "--max-tokens-per-microbatch allow",
        )
        skipped_origins = [row.origin for row, length in zip(rows, lengths, strict=True) if length > limit]
        return (
            f"{len(skipped_origins)} of {len(rows)} prompts have more than {limit} tokens, such as "
            f"{', '.join(skipped_origins[:3])}: skipped"
        )


@functools.lru_cache(4)  # there are two prompt streams, and a step may span two epochs
def _shuffled_order(num_rows: int, seed: int, epoch: int) -> "array[int]":
    """Return the shuffled row order of an epoch."""
    row_order = array("q", range(num_rows))
    random.Random(f"{seed} {epoch}").shuffle(row_order)
    return row_order


def _read_row(row: Row) -> Row:
    """Return a row with a validated prompt; scripts may create unvalidated rows. Raises InputError, naming the row."""
    if isinstance(row.prompt, str):
        return row
    return dataclasses.replace(row, prompt=read_prompt(row.prompt, f"{row.origin}: the prompt"))
