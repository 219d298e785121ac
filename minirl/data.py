"""The prompt stream: rows in an order that is a function of (seed, epoch), as requests. The tokenizer lives here."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minirl.batch import RolloutId
from minirl.distributed import rank, world_size
from minirl.engine import Request
from minirl.errors import InputError
from minirl.sampling import request_key
from minirl.tasks import Messages, Row

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
Encoded = tuple[Row, tuple[int, ...]]


class Prompts:
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
        self.rows, self.tokens, self.tokenizer = [row for row, _ in kept], [tokens for _, tokens in kept], tokenizer
        self.purpose, self.seed, self.max_tokens, self.max_new_tokens = purpose, seed, max_tokens, max_new_tokens
        self.vocab_size = vocab_size
        self._orders: dict[int, list[int]] = {}  # of the epochs last asked for

    def notes(self, *, per_step: int = 0) -> list[str]:
        """Sentences on what is unusual in the rows, if a step takes `per_step` prompts (0: not of a step)."""
        notes = list(self._notes)
        if repeated := len(self.tokens) - len(set(self.tokens)):
            notes.append(f"{repeated} of {len(self.tokens)} prompts repeat an earlier one")
        if len(self.rows) < per_step:
            notes.append(f"a step takes {per_step} prompts and there are {len(self.rows)}: it repeats them")
        if per_step and not any(self.vocab_size is None or i < self.vocab_size for i in self.tokenizer.stop_ids):
            notes.append("the tokenizer has no end-of-sequence token: completions end only at --max-new-tokens")
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
                request_key(self.seed, purpose=self.purpose, prompt=rollout_id.prompt, sample=rollout_id.sample),
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


class Tokenizer:
    """The folder's Hugging Face tokenizer: rows to ids, ids to text, and the ids that end a completion."""

    def __init__(self, folder: Path, *, chat: bool = False):
        """`chat` wraps text prompts as one user message in the chat template."""
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in TOKENIZERS):  # transformers would make up an empty one
            raise InputError(f"{folder}: has no tokenizer ({', '.join(TOKENIZERS)})")
        try:
            self.backend: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (ValueError, OSError, LookupError, ImportError) as error:  # its own code, a damaged file, a package
            raise InputError(f"{folder}: its tokenizer cannot be loaded: {str(error)[:300]}") from None
        self.folder, self.chat = folder, chat
        self._num_ids = len(self.backend)
        self.stop_ids = _stop_ids(folder, self.backend.eos_token_id)

    def encode(self, row: Row) -> list[int]:
        """Token ids of a row's prompt, with the tokenizer's own special tokens or the chat template's, never both."""
        if isinstance(row.prompt, str) and not self.chat:
            return self._ids(row.prompt, row.place)
        return self._render(_messages(row.prompt), row.place, is_prompt=True)

    def encode_answered(self, prompt: str | Messages, completion: str) -> list[int]:
        """Token ids of a prompt and its whole completion, as a reward model reads them.

        Text ends with the end-of-sequence token, where there is one; messages go through the chat template.
        """
        if isinstance(prompt, str) and not self.chat:
            ids, eos = self._ids(prompt + completion, "the reward model"), self.backend.eos_token_id
            return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
        answered = [*_messages(prompt), {"role": "assistant", "content": completion}]
        return self._render(answered, "the reward model", is_prompt=False)

    def _render(self, messages: Messages, place: str, *, is_prompt: bool) -> list[int]:
        from jinja2 import TemplateError

        if self.backend.chat_template is None:
            hint = "leave out --chat" if self.chat else "use text prompts"
            raise InputError(f"{place}: a chat prompt, but this tokenizer has no chat template; {hint}")
        try:
            text = self.backend.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_prompt)
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"{place}: the chat template of {self.folder} refuses the messages: {error}") from None
        return self._ids(text, place, add_special_tokens=False)

    def _ids(self, text: str, place: str, **options: bool) -> list[int]:
        try:
            return list(self.backend(text, **options)["input_ids"])
        except (TypeError, UnicodeError):  # half of a surrogate pair is no character
            raise InputError(f"{place}: the text cannot be tokenized: {ascii(text)[:80]}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without special tokens.

        An id that the tokenizer lacks (a model's vocabulary may be padded) reads U+FFFD: left out, it would let a wrong
        completion pass as a right one.
        """
        parts: list[list[int]] = [[]]
        for i in ids:
            if i < self._num_ids:
                parts[-1].append(i)
            else:
                parts.append([])
        return "\ufffd".join(self.backend.decode(part, skip_special_tokens=True) for part in parts)


def _fitting(
    encoded: Sequence[Encoded], max_tokens: int, max_new_tokens: int, long_prompts: str
) -> tuple[list[Encoded], list[str]]:
    """Rows whose prompts fit, as `Prompts` says, and sentences on the others."""
    shortest, room = min(len(tokens) for _, tokens in encoded), max_tokens - max_new_tokens
    limit, notes = f"{max_tokens} that the model, --cache-tokens and --max-tokens-per-microbatch allow", []
    if shortest >= max_tokens and long_prompts == "skip":
        raise InputError(f"every prompt is too long: the shortest has {shortest} tokens of {limit}; see --long-prompts")
    if shortest > room and (long_prompts != "left" or room < 1):
        room, most = max_tokens - 1, max_tokens - shortest
        what = f"no prompt leaves --max-new-tokens {max_new_tokens} of {limit}"
        notes.append(f"{what}: completions get what their prompts leave, {most} at most")
    if long := [row.place for row, tokens in encoded if len(tokens) > room]:
        places = ", ".join(long[:3]) + (", ..." if len(long) > 3 else "")
        what = f"{len(long)} of {len(encoded)} prompts have more than {room} tokens ({places})"
        if long_prompts == "error":
            raise InputError(f"{what}; --max-new-tokens takes {max_new_tokens} of {limit}; see --long-prompts")
        notes.append(f"{what}: {'left out' if long_prompts == 'skip' else 'cut from the left'}; see --long-prompts")
    if long_prompts == "left":
        return [(row, tokens[max(0, len(tokens) - room) :]) for row, tokens in encoded], notes
    return [(row, tokens) for row, tokens in encoded if len(tokens) <= room], notes


def _messages(prompt: str | Messages) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _stop_ids(folder: Path, eos: int | None) -> frozenset[int]:
    """Every id that the tokenizer, config.json or generation_config.json lists as end of sequence."""
    ids = {eos}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            listed = json.loads((folder / name).read_text()).get("eos_token_id")
            ids |= set(listed) if isinstance(listed, list) else {listed}
    return frozenset(i for i in ids if i is not None)
