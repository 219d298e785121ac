"""The Hugging Face tokenizer: prompts to token ids, token ids to text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minirl.data.stop_ids import find_stop_ids
from minirl.data.task import Messages, Row
from minirl.errors import InputError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """The folder's Hugging Face tokenizer: rows to ids, ids to text, and the ids that end a completion."""

    def __init__(self, folder: Path, *, chat: bool = False):
        """`chat` wraps text prompts as one user message in the chat template."""
        from transformers import AutoTokenizer

        if not any(
            (folder / name).is_file() for name in TOKENIZERS
        ):  # transformers would make up an empty one
            raise InputError(f"{folder}: has no tokenizer ({', '.join(TOKENIZERS)})")
        try:
            self.backend: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (
            ValueError,
            OSError,
            LookupError,
            ImportError,
        ) as error:  # its own code, a damaged file, a package
            raise InputError(f"{folder}: its tokenizer cannot be loaded: {str(error)[:300]}") from None
        self.folder, self.chat = folder, chat
        self._num_ids = len(self.backend)
        self.stop_ids = find_stop_ids(folder, self.backend.eos_token_id)

    def encode(self, row: Row) -> list[int]:
        """Token ids of a row's prompt, with the tokenizer's own special tokens or the chat template's, never both."""
        if isinstance(row.prompt, str) and not self.chat:
            return self._ids(row.prompt, row.place)
        return self._render(as_messages(row.prompt), row.place, is_prompt=True)

    def encode_answered(self, prompt: str | Messages, completion: str) -> list[int]:
        """Token ids of a prompt and its whole completion, as a reward model reads them.

        Text ends with the end-of-sequence token, where there is one; messages go through the chat template.
        """
        if isinstance(prompt, str) and not self.chat:
            ids, eos = self._ids(prompt + completion, "the reward model"), self.backend.eos_token_id
            return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
        answered = [*as_messages(prompt), {"role": "assistant", "content": completion}]
        return self._render(answered, "the reward model", is_prompt=False)

    def _render(self, messages: Messages, place: str, *, is_prompt: bool) -> list[int]:
        from jinja2 import TemplateError

        if self.backend.chat_template is None:
            hint = "leave out --chat" if self.chat else "use text prompts"
            raise InputError(f"{place}: a chat prompt, but this tokenizer has no chat template; {hint}")
        try:
            text = self.backend.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_prompt)
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(
                f"{place}: the chat template of {self.folder} refuses the messages: {error}"
            ) from None
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


def as_messages(prompt: str | Messages) -> Messages:
    """Messages as they are; text as one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
