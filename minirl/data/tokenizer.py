"""The Hugging Face tokenizer: prompts to token ids, token ids to text."""

import copy
import functools
import inspect
import itertools
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from minirl.data.stop_ids import find_stop_ids
from minirl.data.task import Messages, Row, as_messages, conversation
from minirl.data.tools import Tool, renamed, tool_name, tool_schemas
from minirl.errors import InputError, refuse
from minirl.model.folders import file_of

# A model folder with a tokenizer has at least one of these files.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# Limits of a chat template for one prompt: seconds, and characters added to the messages.
_TEMPLATE_SECONDS = 20.0
_TEMPLATE_CHARACTERS = 1_000_000
# A value that no template has as a default.
_PROBE = "minirlprobe"
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
        messages = conversation(as_messages(prompt), [([], lambda: first)]) + others
        has_calls = any("tool_calls" in message for message in messages[-1 - len(others) :])
        refuse(
            has_calls and not self._shows_calls,
            f"{place}: the chat template of {self.folder} does not show calls of tools; take prompts that are text",
        )
        for i, message in enumerate(messages):
            if isinstance(message["content"], list):  # the result of a tool
                messages[i] = {**message, "content": str(message["content"])}
        text = self.apply_template(messages, place, is_prompt=False)
        return self.encode_text(text, place)

    def apply_template(
        self,
        messages: Messages,
        place: str,
        *,
        is_prompt: bool,
        tools: Sequence[dict[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text that the chat template makes of messages, tools and arguments (None: the tokenizer's own).

        A prompt ends with the template's beginning of an answer. If its last message is the assistant's, the
        answer continues that message, as in TRL. Raises InputError naming `place` and the folder if the template
        refuses the messages, takes too long or writes too much.
        """
        if self.backend.chat_template is None:
            hint = "leave out --chat" if self.chat else "use text prompts"
            raise InputError(f"{place}: a chat prompt, but this tokenizer has no chat template; {hint}")
        continues = is_prompt and messages[-1]["role"] == "assistant"
        what = f"{place}: the chat template of {self.folder}"
        try:
            with _time_limit(_TEMPLATE_SECONDS):
                text: str = self.backend.apply_chat_template(
                    messages,
                    tools=list(self.tools if tools is None else tools) or None,
                    tokenize=False,
                    add_generation_prompt=is_prompt and not continues,
                    continue_final_message=continues,
                    **(self.template_arguments if arguments is None else arguments),
                )
        except Exception as error:
            # A template is a program from the model's folder: it may raise anything.
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            raise InputError(f"{what} refuses the messages: {reason}; change the one or the other") from None
        num_added = len(text) - sum(len(message["content"]) for message in messages)
        refuse(
            num_added > _TEMPLATE_CHARACTERS,
            f"{what} adds {num_added} characters to the messages ({_TEMPLATE_CHARACTERS} at most)",
        )
        return text

    def check_arguments(self, flag: str) -> None:
        """Raise InputError, naming the flag, for a template argument that the template ignores: it changes no prompt.

        An argument equal to the template's default passes: another value of it would change a prompt.
        """
        taken = {"messages", *inspect.signature(self.backend.apply_chat_template).parameters}
        for name, value in self.template_arguments.items():
            refuse(name in taken, f"{flag}: leave out {name!r}, which the run sets")
            others = {key: other for key, other in self.template_arguments.items() if key != name}
            without = self._probes(others)
            refuse(
                all(
                    self._probes({**others, name: tried}) == without for tried in (value, True, False, _PROBE)
                ),
                f"{flag}: {name!r} changes nothing in a prompt by the chat template of {self.folder}; leave it out",
            )

    def _probes(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the template's texts of some conversations with these arguments, or its error where it refuses one."""
        user = {"role": "user", "content": "a"}
        answer = {"role": "assistant", "content": "b", "reasoning_content": "c"}
        found = []
        for messages in ([user], [{"role": "system", "content": "d"}, user], [user, answer, user]):
            for is_prompt in (True, False):
                try:
                    found.append(self.apply_template(messages, "", is_prompt=is_prompt, arguments=arguments))
                except InputError as error:
                    found.append(str(error))
        return found

    def _check_tools(self) -> None:
        """Raise InputError if the chat template does not show each tool."""
        refuse(
            self.backend.chat_template is None,
            f"tools: the tokenizer of {self.folder} has no chat template, which would show them",
        )
        names = [tool_name(schema) for schema in self.tools]
        marks = [f"minirltool{i}end" for i in range(len(names))]
        marked = [renamed(schema, mark) for schema, mark in zip(self.tools, marks, strict=True)]
        text = self.apply_template([{"role": "user", "content": "a"}], "tools", is_prompt=True, tools=marked)
        hidden = [name for name, mark in zip(names, marks, strict=True) if mark not in text]
        refuse(
            bool(hidden),
            f"tools: the chat template of {self.folder} does not show {', '.join(hidden)}; describe tools in a message",
        )

    @functools.cached_property
    def _shows_calls(self) -> bool:
        """Return whether the chat template writes the calls of an answer."""
        call = {"type": "function", "function": {"name": "minirlcall", "arguments": {}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages: Messages = [{"role": "user", "content": "a"}, answer]
        return "minirlcall" in self.apply_template(messages, "calls of tools", is_prompt=False)

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
        tokens = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        cleans_spaces = bool(self.backend.clean_up_tokenization_spaces)
        if not tokens or max(tokens) < self.num_ids:
            return self.decode_known(tokens, skip_special_tokens, cleans_spaces)
        # The known ids between unknown ones.
        parts: list[list[int]] = [[]]
        for token in tokens:
            if token < self.num_ids:
                parts[-1].append(token)
            else:
                parts.append([])
        return "\ufffd".join(self.decode_known(part, skip_special_tokens, cleans_spaces) for part in parts)

    def decode_known(self, ids: list[int], skip_special_tokens: bool, cleans_spaces: bool) -> str:
        """Return the text of ids that the tokenizer has. cleans_spaces: removes spaces before punctuation."""
        text: str = self.backend.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=cleans_spaces
        )
        return text


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after this many seconds. Threads other than the main one have no limit."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGALRM, expire)
    # Repeatedly, because the code that runs may swallow the error.
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
