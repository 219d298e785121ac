"""The prompt stream: rows in an order that is a function of (seed, epoch), as requests. The tokenizer lives here."""

import random
from collections.abc import Sequence

from minirl.data.task import Row
from minirl.data.tokenizer import Tokenizer
from minirl.errors import InputError
from minirl.generation.sampling import request_key
from minirl.ranks.process_group import rank, world_size
from minirl.rollouts import Request, RolloutId

Encoded = tuple[Row, tuple[int, ...]]


class PromptStream:
    """The rows of a task that leave room for a completion, tokenized, in shuffled epochs without end.

    The `ordinal`-th prompt of the run is a pure function of (seed, ordinal).
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: "Tokenizer",
        *,
        purpose: str,
        max_tokens: int,
        max_new_tokens: int,
        seed: int = 0,
        vocab_size: int | None = None,
        long_prompts: str = "skip",
    ):
        """`max_tokens` of a prompt and its completion; `purpose` as in `sampling.request_key`; the model's `vocab_size`

        long_prompts, of rows that do not leave `max_new_tokens`: "skip", "error", or "left", cut what is too much from
        the left. Where not one row does, completions get what their prompts leave. Raises InputError naming rows and
        flags, also when no row is left.
        """
        encoded = [(row, tuple(tokenizer.encode(row))) for row in rows]
        for row, tokens in encoded:
            if not tokens:
                raise InputError(f"{row.place}: the prompt has no tokens")
            if vocab_size is not None and max(tokens) >= vocab_size:
                what = f"the prompt has token id {max(tokens)}, the model {vocab_size} embeddings"
                raise InputError(f"{row.place}: {what}; the tokenizer is another model's")
        kept, self._notes = _fitting(encoded, max_tokens, max_new_tokens, long_prompts) if rows else ([], [])
        self.rows, self.tokens, self.tokenizer = (
            [row for row, _ in kept],
            [tokens for _, tokens in kept],
            tokenizer,
        )
        self.purpose, self.seed, self.max_tokens, self.max_new_tokens = (
            purpose,
            seed,
            max_tokens,
            max_new_tokens,
        )
        self.vocab_size = vocab_size
        self._orders: dict[int, list[int]] = {}  # of the epochs last asked for

    def notes(self, *, per_step: int = 0) -> list[str]:
        """Sentences on what is unusual in the rows, if a step takes `per_step` prompts (0: not of a step)."""
        notes = list(self._notes)
        if repeated := len(self.tokens) - len(set(self.tokens)):
            notes.append(f"{repeated} of {len(self.tokens)} prompts repeat an earlier one")
        if len(self.rows) < per_step:
            notes.append(f"a step takes {per_step} prompts and there are {len(self.rows)}: it repeats them")
        if per_step and not any(
            self.vocab_size is None or i < self.vocab_size for i in self.tokenizer.stop_ids
        ):
            notes.append(
                "the tokenizer has no end-of-sequence token: completions end only at --max-new-tokens"
            )
        return [f"{self.purpose}: {note}" for note in notes]

    def requests(
        self, first: int, count: int, *, group_size: int, temperature: float = 1.0, num_greedy: int = 0
    ) -> list[Request]:
        """This rank's share of `count` prompts' requests from the `first` on: a group of each, and after it
        `num_greedy` greedy ones. Side by side, so that a group shares its prefill. Not collective.
        """
        wanted = [
            (self.index(ordinal), RolloutId(ordinal, sample))
            for ordinal in range(first, first + count)
            for sample in range(group_size + num_greedy)
        ]
        share = wanted[len(wanted) * rank() // world_size() : len(wanted) * (rank() + 1) // world_size()]
        return [
            Request(
                self.tokens[index],
                rollout_id,
                request_key(
                    self.seed,
                    purpose=self.purpose,
                    prompt_ordinal=rollout_id.prompt_ordinal,
                    sample=rollout_id.sample,
                ),
                min(self.max_new_tokens, self.max_tokens - len(self.tokens[index])),
                temperature if rollout_id.sample < group_size else 0.0,
                self.tokenizer.stop_ids,
            )
            for index, rollout_id in share
        ]

    def row(self, ordinal: int) -> Row:
        """The row of the `ordinal`-th prompt of the run."""
        return self.rows[self.index(ordinal)]

    def index(self, ordinal: int) -> int:
        """Where in `rows` and `tokens` the `ordinal`-th prompt of the run is."""
        epoch, place = divmod(ordinal, len(self.rows))
        if epoch not in self._orders:
            order = list(range(len(self.rows)))
            random.Random(f"{self.seed} {epoch}").shuffle(order)
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: order}
        return self._orders[epoch][place]

    def epoch(self, ordinal: int) -> float:
        """Epochs served before the `ordinal`-th prompt."""
        return ordinal / len(self.rows)


def _fitting(
    encoded: Sequence[Encoded], max_tokens: int, max_new_tokens: int, long_prompts: str
) -> tuple[list[Encoded], list[str]]:
    """Rows whose prompts fit, as `PromptStream` says, and sentences on the others."""
    shortest, room = min(len(tokens) for _, tokens in encoded), max_tokens - max_new_tokens
    limit, notes = f"{max_tokens} that the model, --cache-tokens and --max-tokens-per-microbatch allow", []
    if shortest >= max_tokens and long_prompts == "skip":
        raise InputError(
            f"every prompt is too long: the shortest has {shortest} tokens of {limit}; see --long-prompts"
        )
    if shortest > room and (long_prompts != "left" or room < 1):
        room, most = max_tokens - 1, max_tokens - shortest
        what = f"no prompt leaves --max-new-tokens {max_new_tokens} of {limit}"
        notes.append(f"{what}: completions get what their prompts leave, {most} at most")
    if long := [row.place for row, tokens in encoded if len(tokens) > room]:
        places = ", ".join(long[:3]) + (", ..." if len(long) > 3 else "")
        what = f"{len(long)} of {len(encoded)} prompts have more than {room} tokens ({places})"
        if long_prompts == "error":
            raise InputError(
                f"{what}; --max-new-tokens takes {max_new_tokens} of {limit}; see --long-prompts"
            )
        notes.append(
            f"{what}: {'left out' if long_prompts == 'skip' else 'cut from the left'}; see --long-prompts"
        )
    if long_prompts == "left":
        return [(row, tokens[max(0, len(tokens) - room) :]) for row, tokens in encoded], notes
    return [(row, tokens) for row, tokens in encoded if len(tokens) <= room], notes
