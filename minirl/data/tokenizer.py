"""The Hugging Face tokenizer: prompts to token ids, token ids to text."""

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minirl.data.task import Messages, Row, add_answer, as_messages, is_token_ids
from minirl.data.tools import Tool, tool_name, tool_schemas
from minirl.errors import InputError, refuse
from minirl.files.json_files import read_json_object
from minirl.model.folders import file_of

# A model folder with a tokenizer has at least one of these files.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# Sequences of roles, each with its tools, that are remembered as shown by the chat template.
MAX_SHOWN_FORMS = 1024
# Texts that others are tokenized behind. A token that spans the border rules one out.
ANCHORS = ("\n", "a", "0", ".")
DECODED_ANCHOR = "a"
# Words that no template mistakes for something else.
_ANSWER = "minirlanswer"
_CONTENT = "minirlcontent{}end"
_CALL = "minirlcall{}end"


class Tokenizer:
    """The tokenizer of a model folder, and the ids that end a completion.

    stop_ids: those of the model's files. chat_stop_ids: with the token that the chat template writes after an answer.
    special_tokens: by their ids.
    """

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

        Raises InputError naming the folder if it has no tokenizer that can be loaded.
        """
        from transformers import AutoTokenizer

        source = file_of(folder, "tokenizer_config.json").parent
        # Without any of these files transformers makes an empty tokenizer.
        has_one = any((source / name).is_file() for name in TOKENIZER_FILES)
        refuse(not has_one, f"{folder}: has no tokenizer ({', '.join(TOKENIZER_FILES)})")
        try:
            self.backend: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:
            # A tokenizer with its own code, a missing package, or a damaged file, which may raise anything.
            raise InputError(f"{folder}: its tokenizer cannot be loaded: {str(error)[:300]}") from None
        self.folder = folder
        self.chat = chat
        self.template_arguments = dict(template_arguments or {})
        self.stop_ids = find_stop_ids(folder, self.backend.eos_token_id)
        # Ids may have holes: the model may have embeddings for ids that are no token.
        self.known_ids = frozenset(self.backend.get_vocab().values())
        self._measure()
        # transformers makes this list each time.
        added = self.backend.added_tokens_decoder.items()
        self.special_tokens = {i: str(token) for i, token in added if token.special}
        self.tools = tool_schemas(tools)
        self.chat_stop_ids = self.stop_ids | self._turn_end_ids()
        # Of all that `with_tools` returns.
        self._shown_forms: set[tuple[Any, ...]] = set()

    def _measure(self) -> None:
        """See which special tokens the tokenizer puts around a text, and how it decodes the anchor's ids."""
        alone = self.encode_text(DECODED_ANCHOR, str(self.folder))
        framed = list(self.backend(DECODED_ANCHOR)["input_ids"])
        starts = (i for i in range(len(framed)) if alone and framed[i : i + len(alone)] == alone)
        first = next(starts, len(framed))
        self._bos_ids, self._eos_ids = framed[:first], framed[first + len(alone) :]
        self._anchor_ids = alone
        self._anchor_texts = [self._decode(alone, is_skipped) for is_skipped in (False, True)]

    def with_tools(self, tools: Sequence[Tool] | None) -> "Tokenizer":
        """Return a tokenizer whose prompts show these tools; None: this one. Raises InputError like `tool_schemas`."""
        if tools is None or tools == self.tools:
            return self
        other = copy.copy(self)
        other.tools = tool_schemas(tools)
        return other

    def encode(self, row: Row) -> list[int]:
        """Return the token ids of a row's prompt.

        Text begins with the tokenizer's BOS token, once, and never ends with its EOS token: the completion goes on.
        Chats have the tokens that the chat template writes. Raises InputError naming the row if the prompt cannot be
        encoded.
        """
        return self._begun(row.prompt, self.encode_text(self._prompt_text(row), row.place))

    def encode_all(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return `encode` of each row, in less time. Raises InputError like `encode`."""
        texts = [self._prompt_text(row) for row in rows]
        try:
            ids = self.backend(texts, add_special_tokens=False)["input_ids"]
        except Exception:
            # One by one, so that the error names its row.
            return [self.encode(row) for row in rows]
        return [self._begun(row.prompt, list(of_row)) for row, of_row in zip(rows, ids, strict=True)]

    def _begun(self, prompt: str | Messages, ids: list[int]) -> list[int]:
        """Return the ids of a prompt with the BOS token before a text, unless that spells it out."""
        has_bos = self.is_chat(prompt) or ids[: len(self._bos_ids)] == self._bos_ids
        return ids if has_bos else self._bos_ids + ids

    def notes(self, prompt: str | Messages) -> list[str]:
        """Return notes on how prompts such as this one begin, and how turns after them end."""
        notes = []
        if self._eos_ids and not self.is_chat(prompt):
            ends = self.backend.decode(self._eos_ids)
            notes.append(f"the tokenizer writes {ends} after texts; prompts go without, to be completed")
        if self.stop_ids_of(prompt) != self.stop_ids:
            ends = ", ".join(self.backend.convert_ids_to_tokens(sorted(self.chat_stop_ids & self.known_ids)))
            notes.append(
                f"turns stop at {ends}; one of them is from the chat template, not the model's files"
            )
        return notes

    def stop_ids_of(self, prompt: str | Messages | list[int]) -> frozenset[int]:
        """Return the ids that end a turn after a prompt."""
        return self.chat_stop_ids if self.is_chat(prompt) else self.stop_ids

    def is_chat(self, prompt: str | Messages | list[int]) -> bool:
        """Return whether a prompt goes through the chat template; for token ids, whether it may have."""
        return self.chat or not isinstance(prompt, str)

    def _prompt_text(self, row: Row) -> str:
        """Return the text of a row's prompt. Raises InputError naming the row, also if row and run have tools."""
        refuse(
            row.tools and self.tools and row.tools != self.tools,
            f"{row.place}: has tools of its own, and so has the run; leave out one of them",
        )
        try:
            shown = self.with_tools(row.tools)
        except InputError as error:
            raise InputError(f"{row.place}: {error}") from None
        if not self.is_chat(row.prompt):
            refuse(shown.tools, f"{row.place}: a text prompt cannot show tools; see --chat")
            return str(row.prompt)
        return shown.shown_text(as_messages(row.prompt), row.place, is_prompt=True)

    def encode_answered(self, prompt: str | Messages, completion: str | Messages) -> list[int]:
        """Return the token ids of a prompt with its whole completion, for a reward model.

        Text ends with exactly one end-of-sequence token, if the tokenizer has one; messages go through the
        chat template. Raises InputError if that leaves out a message or a tool call.
        """
        place = "the reward model"
        if not self.is_chat(prompt):
            ids = self._begun(prompt, self.encode_text(f"{prompt}{completion}", place))
            eos_id = self.backend.eos_token_id
            if eos_id is not None and ids[-1:] != [eos_id]:
                ids.append(eos_id)
            return ids
        answers: list[Any] = [completion] if isinstance(completion, str) else completion
        messages = list(as_messages(prompt))
        add_answer(messages, answers[0])
        messages += answers[1:]
        return self.encode_text(self.shown_text(messages, place, is_prompt=False), place)

    def shown_text(self, messages: Messages, place: str, *, is_prompt: bool) -> str:
        """Return `apply_template` of messages. Raises InputError also if that leaves out a message, tool call or tool.

        Templates drop roles that they do not know, and tools, without a word. So it also renders marks in place of the
        texts, once for each sequence of roles.
        """
        text = self.apply_template(messages, place, is_prompt=is_prompt)
        roles = ((m["role"], bool(m["content"]), len(m.get("tool_calls", ()))) for m in messages)
        form = (str(self.tools), *roles)
        if form in self._shown_forms:
            return text
        marked, marks = marked_messages(messages)
        tools = []
        for tool in self.tools:
            name = _CALL.format(len(marks))
            marks[name] = f"the tool {tool_name(tool)}"
            tools.append({**tool, "function": {**tool["function"], "name": name}})
        outline = self.with_tools(tools).apply_template(marked, place, is_prompt=is_prompt)
        self.refuse_hidden(marks, outline, place)
        if len(self._shown_forms) == MAX_SHOWN_FORMS:
            self._shown_forms.clear()
        self._shown_forms.add(form)
        return text

    def refuse_hidden(self, marks: Mapping[str, str], text: str, place: str) -> None:
        """Raise InputError for the first of `marked_messages` that a text of the chat template does not have."""
        hidden = next((what for mark, what in marks.items() if mark not in text), None)
        refuse(
            hidden,
            f"{place}: the chat template of {self.folder} does not show {hidden}; write it in another role, or as text",
        )

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
            return self.backend.apply_chat_template(
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

    def after_answer(self, messages: Messages, place: str) -> str:
        """Return what the chat template writes after an answer: these messages, and the beginning of the next answer.

        It renders a user's message, a one-word answer and the messages. Raises InputError naming `place`, also if the
        template does not show the word.
        """
        conversation = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": _ANSWER},
            *messages,
        ]
        text = self.apply_template(conversation, place, is_prompt=True)
        _, answer, after = text.partition(_ANSWER)
        refuse(
            not answer,
            f"{place}: the chat template of {self.folder} does not show the text of an answer; append "
            "text or token ids",
        )
        return after

    def following_ids(self, messages: Messages, place: str, *, end_id: int | None) -> list[int]:
        """Return the token ids of messages after an answer, from the answer's end to the start of the next answer.

        The template might write the sampled answer differently, so that is never rendered (`after_answer`).

        end_id: the answer's last id if the model ended it, None if it was cut off. If the template closes an answer
        with this id, the ids up to it are not repeated. Raises InputError naming `place` and the tokenizer's folder if
        the last message is the assistant's, and for messages that the template refuses or does not show.
        """
        refuse(
            messages[-1]["role"] == "assistant",
            f"{place}: generate(after=...): the last message is the assistant's, whose turn the model samples; append "
            "its beginning as text",
        )
        marked, marks = marked_messages(messages)
        outline = self.after_answer(marked, place)
        self.refuse_hidden(marks, outline, place)
        ids = self.encode_appended(self.after_answer(messages, place), place)
        # The template's own text before the first message.
        head = self.encode_appended(outline.partition(next(iter(marks)))[0], place)
        if end_id is None or end_id not in head:
            return ids
        # An ordinary token of the head may also have completed a stop string.
        closes = end_id in self.stop_ids_of(messages) or end_id == head[0]
        return ids[head.index(end_id) + 1 :] if closes else ids

    def check_arguments(self, flag: str) -> None:
        """Raise InputError, naming the flag, for a template argument that the chat template does not use."""
        for name in self.template_arguments:
            refuse(
                not re.search(rf"\b{re.escape(name)}\b", str(self.backend.chat_template)),
                f"{flag}: the chat template of {self.folder} does not use {name!r}; leave it out",
            )

    def _turn_end_ids(self) -> set[int]:
        """Return the special token that the chat template writes after an answer, unless it writes a stop id there."""
        try:
            text = self.after_answer([{"role": "user", "content": _CONTENT}], str(self.folder))
        except InputError:  # no template, or one for other conversations
            return set()
        after = self.encode_appended(text.partition(_CONTENT)[0].lstrip(), str(self.folder))
        is_stopped = not self.stop_ids.isdisjoint(after)
        return set() if is_stopped else set(after[:1]) & self.backend.added_tokens_decoder.keys()

    def encode_text(self, text: str, place: str) -> list[int]:
        """Return the token ids of a text alone, with only the special tokens that it spells out.

        Raises InputError naming `place` if it cannot be tokenized.
        """
        try:
            return list(self.backend(text, add_special_tokens=False)["input_ids"])
        except Exception as error:
            # For example half of a surrogate pair, which is not a character, or a corrupt vocabulary.
            reason = ascii(str(error))[:100]
            raise InputError(f"{place}: the text cannot be tokenized: {ascii(text)[:80]}: {reason}") from None

    def encode_appended(self, text: str, place: str) -> list[int]:
        """Return the token ids of a text that follows other tokens, as `encode_text`; they decode to this text there.

        SentencePiece tokenizers put a space before a text. So it is tokenized behind another, whose ids are cut off.
        """
        if not text:  # as before most turns
            return []
        for anchor in ANCHORS:
            before = self.encode_text(anchor, place)
            ids = self.encode_text(anchor + text, place)
            # Some tokenizers read a line end as a space.
            is_kept = before and self._decode(before, False).removeprefix(" ") == anchor
            if is_kept and ids[: len(before)] == before:
                return ids[len(before) :]
        return self.encode_text(text, place)

    def decode(self, ids: Sequence[int] | NDArray[np.int64], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids that follow others, an array [L] or a list, without special tokens or with them.

        It is the text of all less that of the ids before: SentencePiece tokenizers drop the first space of what they
        decode. An id that is no token (the model's vocabulary may be padded) becomes U+FFFD. Without that, a wrong
        completion could get the reward of a right one.
        """
        tokens = ids.tolist() if hasattr(ids, "tolist") else ids
        parts = []
        for is_known, group in itertools.groupby(tokens, key=self.known_ids.__contains__):
            part = list(group)
            if is_known:
                text = self._decode(self._anchor_ids + part, skip_special_tokens)
                parts.append(text.removeprefix(self._anchor_texts[skip_special_tokens]))
            else:
                parts.append("\ufffd" * len(part))
        return "".join(parts)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.backend.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


def marked_messages(messages: Messages) -> tuple[Messages, dict[str, str]]:
    """Replace the texts and the names of called functions by unique marks.

    Return the messages, and by mark what it stands for.
    """
    marked = []
    marks: dict[str, str] = {}
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            name = _CALL.format(len(marks))
            marks[name] = f"a tool call of a message of role {message['role']!r}"
            calls.append({**call, "function": {**call["function"], "name": name}})
        content = ""
        if message["content"] or not calls:
            content = _CONTENT.format(len(marks))
            marks[content] = f"a message of role {message['role']!r} in its place"
        marked.append({**message, "content": content} | ({"tool_calls": calls} if calls else {}))
    return marked, marks


def find_stop_ids(folder: Path, eos_id: int | None) -> frozenset[int]:
    """Return `eos_id` of the tokenizer and the stop ids of config.json and generation_config.json.

    Raises InputError naming the file that cannot be read.
    """
    stop_ids = set() if eos_id is None else {eos_id}
    for name in ("config.json", "generation_config.json"):
        path = file_of(folder, name)
        # One id, a list of ids, or null.
        listed = read_json_object(path).get("eos_token_id") if path.is_file() else None
        each = listed if isinstance(listed, list) else [listed]
        ids = [i for i in each if i is not None]
        refuse(
            ids and not is_token_ids(ids),
            f"{path}: eos_token_id is {listed!r}; expected a token id or a list of them",
        )
        stop_ids.update(ids)
    return frozenset(stop_ids)
