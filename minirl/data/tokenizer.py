"""The Hugging Face tokenizer: prompts to token ids, token ids to text."""

import copy
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from minirl.data.task import Messages, Row, add_answer, as_messages
from minirl.data.tools import Tool, tool_name, tool_schemas
from minirl.errors import InputError, refuse
from minirl.files.json_files import read_json_object
from minirl.model.folders import file_of

# A model folder with a tokenizer has at least one of these files.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# Lists of tools that were checked and are remembered.
MAX_TOOL_LISTS = 64


class Tokenizer:
    """The tokenizer of a model folder, and the ids that end a completion."""

    def __init__(
        self,
        folder: Path,
        *,
        chat: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
    ):
        """Load the tokenizer; `chat` wraps text prompts as one user message in the chat template.

        template_arguments: further arguments of the template, see `check_arguments`. tools: the tools that prompts show
        to the model.

        Raises InputError naming the folder if it has no tokenizer that can be loaded, or if its chat template does not
        show the tools.
        """
        from transformers import AutoTokenizer

        source = file_of(folder, "tokenizer_config.json").parent
        # Without any of these files transformers makes an empty tokenizer.
        if not any((source / name).is_file() for name in TOKENIZER_FILES):
            raise InputError(f"{folder}: has no tokenizer ({', '.join(TOKENIZER_FILES)})")
        try:
            self.backend: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:
            # A tokenizer with its own code, a missing package, or a damaged file, which may raise anything.
            raise InputError(f"{folder}: its tokenizer cannot be loaded: {str(error)[:300]}") from None
        self.folder = folder
        self.chat = chat
        self.template_arguments = dict(template_arguments or {})
        self.stop_ids = find_stop_ids(folder, self.backend.eos_token_id)
        self.num_ids = len(self.backend)
        self.tools = tool_schemas(tools)
        # Keyed by their tools.
        self._with_tools: dict[str, Tokenizer] = {}
        if self.tools:
            self._check_tools()

    def with_tools(self, tools: Sequence[Tool] | None) -> "Tokenizer":
        """Return a tokenizer whose prompts show these tools; None: this one. Raises InputError like `__init__`."""
        if tools is None or tools == self.tools:
            return self
        key = repr(tools)
        if key not in self._with_tools:
            other = copy.copy(self)
            other.tools = tool_schemas(tools)
            if other.tools:
                other._check_tools()
            if len(self._with_tools) == MAX_TOOL_LISTS:
                self._with_tools.clear()
            self._with_tools[key] = other
        return self._with_tools[key]

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """The special tokens by their ids. Cached, since transformers makes the lists each time."""
        backend = self.backend
        return dict(zip(backend.all_special_ids, backend.all_special_tokens, strict=True))

    def encode(self, row: Row) -> list[int]:
        """Return the token ids of a row's prompt.

        They have either the tokenizer's own special tokens (text) or those of the chat template, never both.
        Raises InputError naming the row if the prompt cannot be encoded.
        """
        text, adds_special_tokens = self._prompt_text(row)
        return self.encode_text(text, row.place, add_special_tokens=adds_special_tokens)

    def encode_all(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return `encode` of each row, in less time. Raises InputError like `encode`."""
        texts = [self._prompt_text(row) for row in rows]
        ids: list[list[int]] = []
        try:
            for adds_special_tokens, group in itertools.groupby(texts, key=lambda text: text[1]):
                same_kind = [text for text, _ in group]
                ids += self.backend(same_kind, add_special_tokens=adds_special_tokens)["input_ids"]
        except Exception:
            # One by one, so that the error names its row.
            return [self.encode(row) for row in rows]
        return ids

    def is_chat(self, prompt: str | Messages | list[int]) -> bool:
        """Return whether a prompt goes through the chat template; for token ids, whether it may have."""
        return self.chat or not isinstance(prompt, str)

    def _prompt_text(self, row: Row) -> tuple[str, bool]:
        """Return the text of a row's prompt, and whether the tokenizer adds its special tokens to it."""
        if isinstance(row.prompt, str) and not self.chat:
            refuse(bool(self.tools), f"{row.place}: a text prompt cannot show tools; see --chat")
            return row.prompt, True
        return self.apply_template(as_messages(row.prompt), row.place, is_prompt=True), False

    def encode_answered(self, prompt: str | Messages, completion: str | Messages) -> list[int]:
        """Return the token ids of a prompt with its whole completion, for a reward model.

        Text ends with exactly one end-of-sequence token, if the tokenizer has one; messages go through the
        chat template. Raises InputError if that does not show calls of tools.
        """
        place = "the reward model"
        if isinstance(prompt, str) and not self.chat:
            assert isinstance(completion, str)
            ids = self.encode_text(prompt + completion, place, add_special_tokens=True)
            eos_id = self.backend.eos_token_id
            has_eos = ids[-1:] == [eos_id]
            if eos_id is not None and not has_eos:
                ids.append(eos_id)
            return ids
        first, others = (completion, []) if isinstance(completion, str) else (completion[0], completion[1:])
        messages = list(as_messages(prompt))
        add_answer(messages, first)
        messages += others
        text = self.apply_template(messages, place, is_prompt=False)
        for call in itertools.chain(*(message.get("tool_calls", ()) for message in messages)):
            refuse(
                call["function"]["name"] not in text,
                f"{place}: the chat template of {self.folder} does not show calls of tools; take prompts that are text",
            )
        return self.encode_text(text, place)

    def apply_template(self, messages: Messages, place: str, *, is_prompt: bool) -> str:
        """Return the text that the chat template makes of messages, the tools and the template's arguments.

        A prompt ends with the template's beginning of an answer. If its last message is the assistant's, the
        answer continues that message, as in TRL. Raises InputError naming `place` and the folder if the template
        refuses the messages.
        """
        if self.backend.chat_template is None:
            hint = "leave out --chat" if self.chat else "use text prompts"
            raise InputError(f"{place}: a chat prompt, but this tokenizer has no chat template; {hint}")
        continues = is_prompt and messages[-1]["role"] == "assistant"
        try:
            text: str = self.backend.apply_chat_template(
                # The result of a tool may be a list.
                [{**message, "content": str(message["content"])} for message in messages],
                tools=self.tools or None,
                tokenize=False,
                add_generation_prompt=is_prompt and not continues,
                continue_final_message=continues,
                **self.template_arguments,
            )
        except Exception as error:
            # A template is a program from the model's folder: it may raise anything.
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            raise InputError(
                f"{place}: the chat template of {self.folder} refuses the messages: {reason}; change the one or the "
                "other"
            ) from None
        return text

    def check_arguments(self, flag: str) -> None:
        """Raise InputError, naming the flag, for a template argument that the chat template does not use."""
        for name in self.template_arguments:
            refuse(
                not re.search(rf"\b{re.escape(name)}\b", str(self.backend.chat_template)),
                f"{flag}: the chat template of {self.folder} does not use {name!r}; leave it out",
            )

    def _check_tools(self) -> None:
        """Raise InputError if the chat template does not show each tool."""
        refuse(
            self.backend.chat_template is None,
            f"tools: the tokenizer of {self.folder} has no chat template, which would show them",
        )
        text = self.apply_template([{"role": "user", "content": "a"}], "tools", is_prompt=True)
        hidden = [name for name in map(tool_name, self.tools) if name not in text]
        refuse(
            bool(hidden),
            f"tools: the chat template of {self.folder} does not show {', '.join(hidden)}; describe tools in a message",
        )

    def encode_text(self, text: str, place: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text alone, with the tokenizer's own special tokens or only those spelt out in it.

        Raises InputError naming `place` if it cannot be tokenized.
        """
        try:
            return list(self.backend(text, add_special_tokens=add_special_tokens)["input_ids"])
        except Exception as error:
            # For example half of a surrogate pair, which is not a character, or a damaged vocabulary.
            reason = ascii(str(error))[:100]
            raise InputError(f"{place}: the text cannot be tokenized: {ascii(text)[:80]}: {reason}") from None

    def decode(self, ids: Sequence[int] | Tensor, *, skip_special_tokens: bool = True) -> str:
        """Return the text of a completion, int64 [L] or a list, without special tokens or with them.

        An id that the tokenizer does not have (the model's vocabulary may be padded) becomes U+FFFD. Without
        that, a wrong completion could get the reward of a right one.
        """
        tokens = ids.tolist() if isinstance(ids, Tensor) else ids
        parts = []
        for is_known, group in itertools.groupby(tokens, key=lambda token: token < self.num_ids):
            part = list(group)
            if is_known:
                parts.append(self.backend.decode(part, skip_special_tokens=skip_special_tokens))
            else:
                parts.append("\ufffd" * len(part))
        return "".join(parts)


def find_stop_ids(folder: Path, eos_id: int | None) -> frozenset[int]:
    """Return `eos_id` of the tokenizer and the stop ids of config.json and generation_config.json.

    Raises InputError naming the file that cannot be read.
    """
    stop_ids = {eos_id}
    for name in ("config.json", "generation_config.json"):
        path = file_of(folder, name)
        # One id, a list of ids, or null.
        listed = read_json_object(path).get("eos_token_id") if path.is_file() else None
        ids = listed if isinstance(listed, list) else [listed]
        is_right = all(i is None or (type(i) is int and i >= 0) for i in ids)
        refuse(not is_right, f"{path}: eos_token_id is {listed!r}; expected a token id or a list of them")
        stop_ids.update(ids)
    return frozenset(stop_id for stop_id in stop_ids if stop_id is not None)
