"""The prompt stream: rows in an order that is a pure function of (seed, epoch), as tokens. The tokenizer lives here."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minirl.tasks import Messages, Row


class Prompts:
    """The rows of a task that fit `max_prompt_tokens`, tokenized, in shuffled epochs without end.

    `tokens[i]` belongs to `rows[i]`; `num_skipped` rows were too long. Raises ValueError when none is left.
    """

    def __init__(self, rows: Sequence[Row], tokenizer: "Tokenizer", *, max_prompt_tokens: int, seed: int = 0):
        encoded = [(row, tokenizer.encode(row)) for row in rows]
        kept = [(row, tokens) for row, tokens in encoded if len(tokens) <= max_prompt_tokens]
        if rows and not kept:
            shortest = min(len(tokens) for _, tokens in encoded)
            raise ValueError(
                f"every prompt is too long: the shortest has {shortest} tokens and {max_prompt_tokens} are left beside "
                "--max-new-tokens"
            )
        self.rows, self.tokens = [row for row, _ in kept], [tuple(tokens) for _, tokens in kept]
        self.num_skipped, self.seed = len(rows) - len(kept), seed
        self._shuffled: tuple[int, list[int]] = (-1, [])  # the epoch last asked for, and its order

    def batch(self, first: int, count: int) -> list[int]:
        """Which rows are the `count` prompts of the run from the `first` on."""
        places = [divmod(ordinal, len(self.rows)) for ordinal in range(first, first + count)]
        orders = {epoch: self._order(epoch) for epoch in {epoch for epoch, _ in places}}
        return [orders[epoch][place] for epoch, place in places]

    def _order(self, epoch: int) -> list[int]:
        if epoch != self._shuffled[0]:
            order = list(range(len(self.rows)))
            random.Random(f"{self.seed} {epoch}").shuffle(order)
            self._shuffled = (epoch, order)
        return self._shuffled[1]

    def epoch(self, ordinal: int) -> float:
        """Epochs served before the `ordinal`-th prompt."""
        return ordinal / len(self.rows)


class Tokenizer:
    """The folder's Hugging Face tokenizer: rows to ids, ids to text, and the ids that end a completion."""

    def __init__(self, folder: Path, *, chat: bool = False):
        """`chat` wraps text prompts as one user message in the chat template."""
        from transformers import AutoTokenizer

        self.backend: Any = AutoTokenizer.from_pretrained(folder)
        self.chat = chat
        self.stop_ids = _stop_ids(folder, self.backend.eos_token_id)

    def encode(self, row: Row) -> list[int]:
        """Token ids of a row's prompt, with the tokenizer's own special tokens or the chat template's, never both."""
        prompt = row.prompt
        if isinstance(prompt, str) and not self.chat:
            return list(self.backend(prompt)["input_ids"])
        messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.backend.chat_template is None:
            raise ValueError(f"{row.place}: a chat prompt, but this tokenizer has no chat template; use text prompts")
        text = self.backend.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.backend(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without special tokens."""
        return self.backend.decode(ids, skip_special_tokens=True)


def _stop_ids(folder: Path, eos: int | None) -> frozenset[int]:
    """Every id that the tokenizer, config.json or generation_config.json lists as end of sequence."""
    ids = {eos}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            listed = json.loads((folder / name).read_text()).get("eos_token_id")
            ids |= set(listed) if isinstance(listed, list) else {listed}
    return frozenset(i for i in ids if i is not None)
