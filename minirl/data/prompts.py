"""The prompt stream: rows in an order that is a function of (seed, epoch), as requests for the engine."""

import copy
import dataclasses
import functools
import random
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, cast

from minirl.data.answers import check_readable
from minirl.data.task import After, Messages, Row, is_messages, is_token_ids, read_prompt
from minirl.data.tokenizer import Tokenizer
from minirl.errors import refuse
from minirl.generation.sampling import request_key
from minirl.ranks.process_group import rank, world_size
from minirl.rollouts import NO_TRUNCATION, Request, RolloutId, Truncation

# Rows that are tokenized together when they are checked.
ROWS_PER_CHECK = 64


class PromptStream:
    """The prompts of a task in endless shuffled epochs, without those that are too long.

    A prompt's number in the stream is its `prompt_ordinal`, counted over the whole run. Its row is a pure
    function of (seed, prompt_ordinal). Prompts are tokenized when they are served.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        *,
        purpose: str,
        max_tokens: int,
        max_new_tokens: int,
        seed: int = 0,
        vocab_size: int | None = None,
    ):
        """Tokenize all rows once to check their lengths and ids.

        purpose: as in `sampling.request_key`. max_tokens: limit of a prompt together with its completion.
        vocab_size: the number of the model's embeddings; None: of the tokenizer's ids.

        Prompts that leave fewer than `max_new_tokens` tokens for the completion are skipped. Raises InputError naming
        rows and flags, also if no row is left.
        """
        self.tokenizer = tokenizer
        self.purpose = purpose
        self.seed = seed
        self.max_tokens = max_tokens
        self.max_new_tokens = max_new_tokens
        self.vocab_size = vocab_size or max(tokenizer.known_ids) + 1
        # Of the distributions that requests sample from; an evaluation may set another. Greedy requests have none.
        self.truncation: Truncation = NO_TRUNCATION
        # Notes on the rows. A caller that leaves out some adds its own.
        self.row_notes = [note for row in rows[:1] for note in tokenizer.notes(row.prompt)]
        # Tokens of the longest served prompt.
        self.longest_prompt = 0
        self._rows = self._served(list(map(_read_row, rows)))
        # Of two epochs: a step may begin in one and end in the next.
        self._order = functools.lru_cache(2)(self._shuffled)

    @property
    def num_prompts(self) -> int:
        """The number of prompts in an epoch."""
        return len(self._rows)

    def notes(self, *, per_step: int = 0) -> list[str]:
        """Return notes on unusual rows.

        per_step: the number of prompts that a training step takes, 0 if the stream is not for training.
        """
        notes = list(self.row_notes)
        if self.num_prompts < per_step:
            notes.append(f"a step takes {per_step} prompts and there are {self.num_prompts}: it repeats them")
        if per_step:
            stop_ids = self.tokenizer.stop_ids_of(self._rows[0].prompt)
            if all(stop_id >= self.vocab_size for stop_id in stop_ids):
                notes.append(
                    "the tokenizer has no end-of-sequence token: completions end only at --max-new-tokens"
                )
        return [f"{self.purpose}: {note}" for note in notes]

    def requests(
        self, ordinals: Iterable[int], *, group_size: int, temperature: float = 1.0, num_greedy: int = 0
    ) -> list[Request]:
        """Return this rank's share of the requests for these prompts.

        Not collective. Each prompt has a group of `group_size` requests, followed by `num_greedy` greedy ones. A rank
        has whole groups: it prefills a prompt once, and has everything that a reward may compare. The ranks take the
        ordinals in turn, so that they get equally many prompts even if each call is for one.
        """
        requests = []
        for prompt_ordinal in ordinals:
            if prompt_ordinal % world_size() != rank():
                continue
            row = self.row(prompt_ordinal)
            prompt_ids = tuple(self.tokenizer.encode(row))
            for sample in range(group_size + num_greedy):
                rollout_id = RolloutId(prompt_ordinal, sample)
                sampled_at = temperature if sample < group_size else 0.0
                requests.append(self.request(rollout_id, row.prompt, prompt_ids, sampled_at))
        return requests

    def request(
        self,
        rollout_id: RolloutId,
        prompt: str | Messages | list[int],
        prompt_ids: tuple[int, ...],
        temperature: float,
    ) -> Request:
        """Return the request for one rollout of a prompt, given its ids. Not collective."""
        return Request(
            prompt_ids=prompt_ids,
            rollout_id=rollout_id,
            key=self.key(rollout_id),
            max_new_tokens=min(self.max_new_tokens, self.max_tokens - len(prompt_ids)),
            temperature=temperature,
            stop_ids=self.tokenizer.stop_ids_of(prompt),
            truncation=self.truncation,
        )

    def key(self, rollout_id: RolloutId) -> int:
        """Return the key of a rollout's randomness, as in `sampling.request_key`."""
        return request_key(self.seed, purpose=self.purpose, **rollout_id._asdict())

    def prompt_ids(self, prompt_ordinal: int) -> tuple[int, ...]:
        """Return the token ids of a prompt."""
        return tuple(self.tokenizer.encode(self.row(prompt_ordinal)))

    def appended_ids(
        self,
        after: After,
        place: str,
        *,
        end_id: int | None,
        tools: list[dict[str, Any]] | None,
    ) -> list[int]:
        """Return the ids that are appended between two turns: text is tokenized as it is, without a first space.

        after: messages as `read_message` returns them. end_id: for these, see `Tokenizer.following_ids`. tools:
        those that the prompt shows. Raises InputError naming `place` for messages that cannot be rendered, and for ids
        that the model does not have.
        """
        if isinstance(after, str):
            ids = self.tokenizer.encode_appended(after, place)
        elif is_messages(after):
            ids = self.tokenizer.with_tools(tools).following_ids(after, place, end_id=end_id)
        else:
            ids = list(cast(Sequence[int], after))
            refuse(
                ids and not is_token_ids(ids),
                f"{place}: generate(after=...): expected text, token ids or messages",
            )
        self._check_ids(f"{place}: generate(after=...)", ids)
        return ids

    def branch_ids(
        self,
        prompt: str | Messages | list[int],
        place: str,
        *,
        tools: list[dict[str, Any]] | None,
    ) -> tuple[int, ...]:
        """Return the ids of the prompt of an episode's further branch: text, messages or the ids themselves.

        tools: those that a prompt of messages shows; None: the tokenizer's. Raises InputError naming `place` for an
        unusable prompt, and for tools that the chat template does not show or whose calls cannot be read. The prompt
        may be too long.
        """
        place = f"{place}: branch(...)"
        if is_token_ids(prompt):
            ids = list(prompt)
        else:
            shown = self.tokenizer.with_tools(tools)
            ids = shown.encode(Row(cast(str | Messages, prompt), {}, place))
            if tools and shown is not self.tokenizer:
                check_readable(shown)
        refuse(not ids, f"{place}: the prompt has no tokens")
        self._check_ids(place, ids)
        return tuple(ids)

    def row(self, prompt_ordinal: int) -> Row:
        """Return the row of a prompt: a copy, which its caller may change."""
        row = self._rows[self.index(prompt_ordinal)]
        return Row(*map(copy.deepcopy, vars(row).values()))  # faster than a deep copy of the row

    def index(self, prompt_ordinal: int) -> int:
        """Return the number of a prompt among the rows that are served.

        A script may replace this function, for a curriculum. It must return the same number as long as the prompt is in
        use: throughout a step, and after a resume.
        """
        epoch, position = divmod(prompt_ordinal, self.num_prompts)
        return self._order(epoch)[position]

    def _shuffled(self, epoch: int) -> "array[int]":
        """Return the order of the rows in an epoch."""
        order = array("q", range(self.num_prompts))
        random.Random(f"{self.seed} {epoch}").shuffle(order)
        return order

    def _served(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that are served, see `__init__`. Raises InputError naming the first bad row."""
        limit = self.max_tokens - self.max_new_tokens
        served = []
        too_long = []
        for first in range(0, len(rows), ROWS_PER_CHECK):
            part = rows[first : first + ROWS_PER_CHECK]
            for row, ids in zip(part, self.tokenizer.encode_all(part), strict=True):
                refuse(not ids, f"{row.place}: the prompt has no tokens")
                self._check_ids(row.place, ids)
                if len(ids) > limit:
                    too_long.append((len(ids), row.place))
                    continue
                served.append(row)
                self.longest_prompt = max(self.longest_prompt, len(ids))
        if too_long:
            refuse(
                not served,
                f"every prompt is too long: the shortest has {min(too_long)[0]} tokens, and --max-new-tokens "
                f"{self.max_new_tokens} leaves {limit} of the {self.max_tokens} that the model, --cache-tokens and "
                "--max-tokens-per-microbatch allow",
            )
            listed = ", ".join(place for _, place in too_long[:3]) + (", ..." if len(too_long) > 3 else "")
            counts = f"{len(too_long)} of {len(rows)} prompts"
            self.row_notes.append(f"{counts} have more than {limit} tokens ({listed}): left out")
        return served

    def _check_ids(self, place: str, ids: Sequence[int]) -> None:
        """Raise InputError naming the place for an id that the model does not know."""
        largest = max(ids, default=0)
        refuse(
            largest >= self.vocab_size,
            f"{place}: token id {largest}, and the model has {self.vocab_size} embeddings; is the tokenizer "
            "another model's?",
        )


def _read_row(row: Row) -> Row:
    """Return a row with its messages read: scripts make rows, too. Raises InputError naming the row."""
    if isinstance(row.prompt, str):
        return row
    return dataclasses.replace(row, prompt=read_prompt(row.prompt, f"{row.place}: the prompt"))
