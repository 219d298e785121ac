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


class Prompts:
    """The rows of a task that leave room for a completion, tokenized, in shuffled epochs without end.

    The `ordinal`-th prompt of the run is a pure function of (seed, ordinal). `num_skipped` rows were too long. Raises
    InputError when none is left.
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
    ):
        """`max_tokens` of a prompt and its completion; `purpose` as in `sampling.request_key`."""
        encoded = [(row, tokenizer.encode(row)) for row in rows]
        kept = [(row, tokens) for row, tokens in encoded if len(tokens) + max_new_tokens <= max_tokens]
        if rows and not kept:
            shortest = min(len(tokens) for _, tokens in encoded)
            raise InputError(
                f"every prompt is too long: the shortest has {shortest} tokens; of {max_tokens} that the model, "
                f"--cache-tokens and --max-tokens-per-microbatch allow, --max-new-tokens takes {max_new_tokens}"
            )
        self.rows, self.tokens = [row for row, _ in kept], [tuple(tokens) for _, tokens in kept]
        self.num_skipped, self.tokenizer = len(rows) - len(kept), tokenizer
        self.purpose, self.max_new_tokens, self.seed = purpose, max_new_tokens, seed
        self._orders: dict[int, list[int]] = {}  # of the epochs last asked for

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
                self.max_new_tokens,
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
        self.backend: Any = AutoTokenizer.from_pretrained(folder)
        self.chat = chat
        self._num_ids = len(self.backend)
        self.stop_ids = _stop_ids(folder, self.backend.eos_token_id)

    def encode(self, row: Row) -> list[int]:
        """Token ids of a row's prompt, with the tokenizer's own special tokens or the chat template's, never both."""
        if isinstance(row.prompt, str) and not self.chat:
            return list(self.backend(row.prompt)["input_ids"])
        return self._render(_messages(row.prompt), row.place, add_generation_prompt=True)

    def encode_answered(self, prompt: str | Messages, completion: str) -> list[int]:
        """Token ids of a prompt and its whole completion, as a reward model reads them.

        Text ends with the end-of-sequence token, where there is one; messages go through the chat template.
        """
        if isinstance(prompt, str) and not self.chat:
            ids, eos = list(self.backend(prompt + completion)["input_ids"]), self.backend.eos_token_id
            return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
        answered = [*_messages(prompt), {"role": "assistant", "content": completion}]
        return self._render(answered, "the reward model", add_generation_prompt=False)

    def _render(self, messages: Messages, place: str, *, add_generation_prompt: bool) -> list[int]:
        if self.backend.chat_template is None:
            hint = "leave out --chat" if self.chat else "use text prompts"
            raise InputError(f"{place}: a chat prompt, but this tokenizer has no chat template; {hint}")
        text = self.backend.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
        return list(self.backend(text, add_special_tokens=False)["input_ids"])

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
