"""The Hugging Face tokenizer: prompts to token ids, token ids to text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minirl.data.stop_ids import find_stop_ids
from minirl.data.task import Messages, Row
from minirl.errors import InputError

# A model folder with a tokenizer has at least one of these files.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """The tokenizer of a model folder, and the ids that end a completion."""

    def __init__(self, folder: Path, *, chat: bool = False):
        """Load the tokenizer; `chat` wraps text prompts as one user message in the chat template.

        Raises InputError naming the folder if it has no tokenizer that can be loaded.
        """
        from transformers import AutoTokenizer

        # Without any of these files transformers makes an empty tokenizer.
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise InputError(f"{folder}: has no tokenizer ({', '.join(TOKENIZER_FILES)})")
        # What fails: a tokenizer with code of its own, a damaged file, or a missing package.
        load_errors = (ValueError, OSError, LookupError, ImportError)
        try:
            self.backend: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except load_errors as error:
            raise InputError(f"{folder}: its tokenizer cannot be loaded: {str(error)[:300]}") from None
        self.folder = folder
        self.chat = chat
        self.stop_ids = find_stop_ids(folder, self.backend.eos_token_id)
        self._num_ids = len(self.backend)

    def encode(self, row: Row) -> list[int]:
        """Return the token ids of a row's prompt.

        They have either the tokenizer's own special tokens (text) or those of the chat template, never both.
        Raises InputError naming the row if the prompt cannot be encoded.
        """
        if isinstance(row.prompt, str) and not self.chat:
            return self._encode_text(row.prompt, row.place)
        return self._encode_messages(as_messages(row.prompt), row.place, is_prompt=True)

    def encode_answered(self, prompt: str | Messages, completion: str) -> list[int]:
        """Return the token ids of a prompt with its whole completion, for a reward model.

        Text ends with exactly one end-of-sequence token, if the tokenizer has one; messages go through the
        chat template.
        """
        place = "the reward model"
        if isinstance(prompt, str) and not self.chat:
            ids = self._encode_text(prompt + completion, place)
            eos_id = self.backend.eos_token_id
            has_eos = ids[-1:] == [eos_id]
            if eos_id is not None and not has_eos:
                ids.append(eos_id)
            return ids
        messages = [*as_messages(prompt), {"role": "assistant", "content": completion}]
        return self._encode_messages(messages, place, is_prompt=False)

    def _encode_messages(self, messages: Messages, place: str, *, is_prompt: bool) -> list[int]:
        """Encode messages by the chat template; a prompt ends with the template's beginning of an answer."""
        from jinja2 import TemplateError

        if self.backend.chat_template is None:
            hint = "leave out --chat" if self.chat else "use text prompts"
            raise InputError(f"{place}: a chat prompt, but this tokenizer has no chat template; {hint}")
        try:
            text = self.backend.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_prompt)
        except (TemplateError, TypeError, ValueError) as error:
            what = f"the chat template of {self.folder} refuses the messages"
            raise InputError(f"{place}: {what}: {error}") from None
        return self._encode_text(text, place, add_special_tokens=False)

    def _encode_text(self, text: str, place: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            return list(self.backend(text, add_special_tokens=add_special_tokens)["input_ids"])
        except (TypeError, UnicodeError):
            # For example half of a surrogate pair, which is no character.
            raise InputError(f"{place}: the text cannot be tokenized: {ascii(text)[:80]}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens.

        An id that the tokenizer does not have (the model's vocabulary may be padded) becomes U+FFFD. Without
        that, a wrong completion could get the reward of a right one.
        """
        # The known ids between unknown ones.
        parts: list[list[int]] = [[]]
        for token_id in ids:
            if token_id < self._num_ids:
                parts[-1].append(token_id)
            else:
                parts.append([])
        texts = [self.backend.decode(part, skip_special_tokens=True) for part in parts]
        return "\ufffd".join(texts)


def as_messages(prompt: str | Messages) -> Messages:
    """Return messages as they are, and text as one user message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt
