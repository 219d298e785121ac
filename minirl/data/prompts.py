"""The prompt stream: rows in an order that is a function of (seed, epoch), as requests for the engine."""

import random
from collections.abc import Sequence

from minirl.data.task import Row
from minirl.data.tokenizer import Tokenizer
from minirl.errors import InputError
from minirl.generation.sampling import request_key
from minirl.ranks.process_group import rank, world_size
from minirl.rollouts import Request, RolloutId

EncodedRow = tuple[Row, tuple[int, ...]]


class PromptStream:
    """The tokenized prompts of a task in shuffled epochs without end; those that are too long are left out.

    A prompt's number in the stream is its `prompt_ordinal`, counted over the whole run. Its row is a pure
    function of (seed, prompt_ordinal).
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
        long_prompts: str = "skip",
    ):
        """Tokenize the rows and check their lengths and ids.

        purpose: as in `sampling.request_key`. max_tokens: limit of a prompt together with its completion.
        vocab_size: the number of the model's embeddings. long_prompts: what to do with prompts that leave
        fewer than `max_new_tokens` tokens for the completion: "skip" them, raise an "error", or truncate them
        on the "left". If no prompt leaves as many, all that leave at least one token are kept, and their
        completions are shorter.

        Raises InputError naming rows and flags, also if no row is left.
        """
        encoded = [(row, tuple(tokenizer.encode(row))) for row in rows]
        for row, prompt_ids in encoded:
            _check_ids(row, prompt_ids, vocab_size)
        self._notes: list[str] = []
        if encoded:
            encoded, self._notes = _fit_prompts(encoded, max_tokens, max_new_tokens, long_prompts)
        self.rows = [row for row, _ in encoded]
        self.prompt_ids = [prompt_ids for _, prompt_ids in encoded]
        self.tokenizer = tokenizer
        self.purpose = purpose
        self.seed = seed
        self.max_tokens = max_tokens
        self.max_new_tokens = max_new_tokens
        self.vocab_size = vocab_size
        # The orders of the epochs that were last asked for.
        self._orders: dict[int, list[int]] = {}

    def notes(self, *, per_step: int = 0) -> list[str]:
        """Return sentences on what is unusual in the rows.

        per_step: the number of prompts that a training step takes, 0 if the stream is not for training.
        """
        notes = list(self._notes)
        num_repeated = len(self.prompt_ids) - len(set(self.prompt_ids))
        if num_repeated:
            notes.append(f"{num_repeated} of {len(self.prompt_ids)} prompts repeat an earlier one")
        if len(self.rows) < per_step:
            notes.append(f"a step takes {per_step} prompts and there are {len(self.rows)}: it repeats them")
        if per_step and not self._can_stop():
            notes.append(
                "the tokenizer has no end-of-sequence token: completions end only at --max-new-tokens"
            )
        return [f"{self.purpose}: {note}" for note in notes]

    def _can_stop(self) -> bool:
        """Return whether the model can sample a stop id."""
        if self.vocab_size is None:
            return bool(self.tokenizer.stop_ids)
        return any(stop_id < self.vocab_size for stop_id in self.tokenizer.stop_ids)

    def requests(
        self, first: int, count: int, *, group_size: int, temperature: float = 1.0, num_greedy: int = 0
    ) -> list[Request]:
        """Return this rank's share of the requests for `count` prompts, from ordinal `first` on.

        Not collective. Each prompt has a group of `group_size` requests, followed by `num_greedy` greedy
        ones. They are adjacent, so that a group shares its prefill.
        """
        rollout_ids = []
        for prompt_ordinal in range(first, first + count):
            for sample in range(group_size + num_greedy):
                rollout_ids.append(RolloutId(prompt_ordinal, sample))
        # A contiguous share: the shares of two ranks differ by at most one request.
        begin = len(rollout_ids) * rank() // world_size()
        end = len(rollout_ids) * (rank() + 1) // world_size()
        requests = []
        for rollout_id in rollout_ids[begin:end]:
            is_greedy = rollout_id.sample >= group_size
            requests.append(self._request(rollout_id, 0.0 if is_greedy else temperature))
        return requests

    def _request(self, rollout_id: RolloutId, temperature: float) -> Request:
        prompt_ids = self.prompt_ids[self.index(rollout_id.prompt_ordinal)]
        key = request_key(
            self.seed,
            purpose=self.purpose,
            prompt_ordinal=rollout_id.prompt_ordinal,
            sample=rollout_id.sample,
        )
        return Request(
            prompt_ids=prompt_ids,
            rollout_id=rollout_id,
            key=key,
            max_new_tokens=min(self.max_new_tokens, self.max_tokens - len(prompt_ids)),
            temperature=temperature,
            stop_ids=self.tokenizer.stop_ids,
        )

    def row(self, prompt_ordinal: int) -> Row:
        """Return the row of a prompt."""
        return self.rows[self.index(prompt_ordinal)]

    def index(self, prompt_ordinal: int) -> int:
        """Return the index of a prompt in `rows` and `prompt_ids`."""
        epoch, position = divmod(prompt_ordinal, len(self.rows))
        if epoch not in self._orders:
            order = list(range(len(self.rows)))
            random.Random(f"{self.seed} {epoch}").shuffle(order)
            # Keep the previous epoch too: a step may begin in one epoch and end in the next.
            orders = {epoch: order}
            if epoch - 1 in self._orders:
                orders[epoch - 1] = self._orders[epoch - 1]
            self._orders = orders
        return self._orders[epoch][position]

    def epoch(self, prompt_ordinal: int) -> float:
        """Return the number of epochs before a prompt, as a fraction."""
        return prompt_ordinal / len(self.rows)


def _check_ids(row: Row, prompt_ids: tuple[int, ...], vocab_size: int | None) -> None:
    """Raise InputError naming the row if the prompt is empty or has ids that the model does not know."""
    if not prompt_ids:
        raise InputError(f"{row.place}: the prompt has no tokens")
    largest = max(prompt_ids)
    if vocab_size is not None and largest >= vocab_size:
        what = f"the prompt has token id {largest}, the model {vocab_size} embeddings"
        raise InputError(f"{row.place}: {what}; the tokenizer is another model's")


def _fit_prompts(
    encoded: list[EncodedRow], max_tokens: int, max_new_tokens: int, long_prompts: str
) -> tuple[list[EncodedRow], list[str]]:
    """Skip or truncate long prompts as `PromptStream` describes.

    Returns the rows that fit, and notes on the others.
    """
    notes = []
    shortest = min(len(prompt_ids) for _, prompt_ids in encoded)
    max_prompt_tokens = max_tokens - max_new_tokens
    limit = f"{max_tokens} that the model, --cache-tokens and --max-tokens-per-microbatch allow"
    if shortest >= max_tokens and long_prompts == "skip":
        raise InputError(
            f"every prompt is too long: the shortest has {shortest} tokens of {limit}; see --long-prompts"
        )

    # If no prompt leaves max_new_tokens and truncation cannot help, allow all that leave at least one token.
    can_truncate = long_prompts == "left" and max_prompt_tokens >= 1
    if shortest > max_prompt_tokens and not can_truncate:
        max_prompt_tokens = max_tokens - 1
        what = f"no prompt leaves --max-new-tokens {max_new_tokens} of {limit}"
        notes.append(f"{what}: completions get what their prompts leave, {max_tokens - shortest} at most")

    long_places = [row.place for row, prompt_ids in encoded if len(prompt_ids) > max_prompt_tokens]
    if long_places:
        places = ", ".join(long_places[:3])
        if len(long_places) > 3:
            places += ", ..."
        counts = f"{len(long_places)} of {len(encoded)} prompts"
        what = f"{counts} have more than {max_prompt_tokens} tokens ({places})"
        if long_prompts == "error":
            taken = f"--max-new-tokens takes {max_new_tokens} of {limit}"
            raise InputError(f"{what}; {taken}; see --long-prompts")
        done = "left out" if long_prompts == "skip" else "cut from the left"
        notes.append(f"{what}: {done}; see --long-prompts")

    fitting = []
    for row, prompt_ids in encoded:
        if long_prompts == "left":
            # Keep the last tokens.
            prompt_ids = prompt_ids[max(0, len(prompt_ids) - max_prompt_tokens) :]
        if len(prompt_ids) <= max_prompt_tokens:
            fitting.append((row, prompt_ids))
    return fitting, notes
