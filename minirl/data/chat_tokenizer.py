"""Tokenize prompts: plain text, or messages and tools rendered with the chat template."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

from minirl.data.messages import (
    After,
    Messages,
    Prompt,
    Tool,
    add_answer,
    as_messages,
    is_messages,
    is_token_ids,
    tool_schemas,
)
from minirl.data.task import Row
from minirl.data.tokenizer import Tokenizer
from minirl.errors import InputError, refuse

# Tokenizers are several times faster with many texts per call.
ROWS_PER_BATCH = 64
# Placeholder words that no template treats as markup.
_ANSWER = "minirlanswer"
_MARK = "minirlmark{}end"


class ChatTokenizer(Tokenizer):
    """A model's tokenizer that also encodes prompts and appended messages.

    chat: whether text prompts go through the chat template, as one user message. tools: JSON schemas of the tools
    that prompts include. chat_stop_ids: `stop_ids` plus the token that the chat template writes after an assistant
    message.
    vocab_size: number of rows in the model's embedding.
    """

    def __init__(
        self,
        folder: Path,
        *,
        chat: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        vocab_size: int | None = None,
    ):
        """Load a model folder's tokenizer.

        template_arguments: extra arguments for the chat template; see `check_template_arguments`. vocab_size: None
        means the tokenizer's largest id + 1. Raises InputError under the same conditions as `Tokenizer` and
        `tool_schemas`.
        """
        super().__init__(folder)
        self.chat = chat
        self.template_arguments = dict(template_arguments or {})
        self.tools = tool_schemas(tools) if tools else []
        self.vocab_size = vocab_size or max(self.known_ids) + 1
        self.chat_stop_ids = self.stop_ids
        if self.backend.chat_template is not None:
            self.chat_stop_ids |= self._turn_end_ids()

    def with_tools(self, tools: Sequence[Tool] | None) -> Self:
        """Return a copy whose prompts include these tools, or self if `tools` is None or unchanged.

        Raises InputError under the same conditions as `tool_schemas`.
        """
        if tools is None or tools == self.tools:
            return self
        tokenizer = copy.copy(self)
        tokenizer.tools = tool_schemas(tools)
        return tokenizer

    def is_chat(self, prompt: Prompt) -> bool:
        """Whether a prompt counts as a chat prompt: messages, token ids, or, if `chat` is set, text."""
        return self.chat or not isinstance(prompt, str)

    def stop_ids_of(self, prompt: Prompt) -> frozenset[int]:
        """Return the ids of the tokens that end a turn after this prompt."""
        return self.chat_stop_ids if self.is_chat(prompt) else self.stop_ids

    def template_notes(self, prompt: str | Messages) -> list[str]:
        """Return notes for the log about a missing EOS token or unusual stop tokens, given one of the prompts."""
        notes = []
        if self.eos_ids and not self.is_chat(prompt):
            ends = self.backend.decode(self.eos_ids)
            notes.append(
                f"the tokenizer writes {ends} after texts; prompts omit it, because completions continue the prompts"
            )
        stop_ids = self.stop_ids_of(prompt)
        if stop_ids != self.stop_ids:
            ends = ", ".join(self.backend.convert_ids_to_tokens(sorted(stop_ids & self.known_ids)))
            notes.append(
                f"turns stop at {ends}; one of these tokens is from the chat template, not the model's files"
            )
        if min(stop_ids, default=self.vocab_size) >= self.vocab_size:
            notes.append(
                "the tokenizer has no end-of-sequence token: completions end only at --max-new-tokens"
            )
        return notes

    def encode(self, row: Row) -> list[int]:
        """Return the token ids of one row's prompt; see `encode_all`."""
        return next(self.encode_all([row]))

    def encode_all(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        """Yield the token ids of each row's prompt. Chat prompts include the row's tools, or else the run's tools.

        Text prompts begin with exactly one BOS token and never end with EOS, because completions continue text prompts.
        Chat prompts have only the special tokens that the chat template writes. Raises InputError, naming the row, if
        the prompt cannot be encoded, is empty or has ids outside the model's vocabulary, or if the row and the run have
        different tools.
        """
        for first in range(0, len(rows), ROWS_PER_BATCH):
            batch = rows[first : first + ROWS_PER_BATCH]
            texts = [self._prompt_text(row) for row in batch]
            try:
                encoded = self.backend(texts, add_special_tokens=False)["input_ids"]
            except Exception:
                # Encode the texts one by one, so that the error names the row.
                encoded = [self.encode_text(text, row.origin) for row, text in zip(batch, texts, strict=True)]
            for row, ids in zip(batch, encoded, strict=True):
                if not self.is_chat(row.prompt):
                    ids = self.with_bos(ids)
                refuse(not ids, f"{row.origin}: the prompt has no tokens")
                self.check_ids(ids, row.origin)
                yield ids

    def _prompt_text(self, row: Row) -> str:
        """Return a row's prompt as text. Raises InputError, naming the row."""
        if not self.is_chat(row.prompt):
            refuse(
                row.tools or self.tools,
                f"{row.origin}: a text prompt cannot describe tools to the model; see --chat",
            )
            return cast(str, row.prompt)
        refuse(
            row.tools and self.tools and row.tools != self.tools,
            f"{row.origin}: both the row and the run have tools; leave out one of them",
        )
        try:
            tokenizer = self.with_tools(row.tools)
        except InputError as error:
            raise InputError(f"{row.origin}: {error}") from None
        return tokenizer.render_checked(as_messages(row.prompt), row.origin, is_prompt=True)

    def encode_between_turns(self, after: After, origin: str, *, end_id: int | None) -> list[int]:
        """Return the token ids to append between two turns. Text is tokenized without a leading space.

        after: text, token ids, or messages from `read_message`. end_id: see `encode_following_messages`. Raises
        InputError, naming `origin`, for messages that cannot be rendered and for ids outside the model's vocabulary.
        """
        if is_messages(after):
            ids = self.encode_following_messages(after, origin, end_id=end_id)
        elif isinstance(after, str):
            ids = self.encode_appended(after, origin)
        elif is_token_ids(after):
            ids = list(after)
        else:
            raise InputError(f"{origin}: generate(after=...): expected text, token ids or messages")
        self.check_ids(ids, f"{origin}: generate(after=...)")
        return ids

    def encode_with_completion(self, prompt: str | Messages, completion: str | Messages) -> list[int]:
        """Return the token ids of a prompt and its whole completion, for a reward model.

        Text ends with exactly one EOS token, if the tokenizer has one; messages go through the chat template. Raises
        InputError if the template drops a message or a tool call.
        """
        origin = "the reward model"
        if not self.is_chat(prompt):
            ids = self.with_bos(self.encode_text(f"{prompt}{completion}", origin))
            eos_id = self.backend.eos_token_id
            if eos_id is not None and ids[-1:] != [eos_id]:
                ids.append(eos_id)
            return ids
        answers: list[Any] = [completion] if isinstance(completion, str) else completion
        messages = list(as_messages(prompt))
        add_answer(messages, answers[0])
        return self.encode_text(self.render_checked(messages + answers[1:], origin, is_prompt=False), origin)

    def check_ids(self, ids: Sequence[int], origin: str) -> None:
        """Raise InputError, naming the origin, for an id outside the model's vocabulary."""
        max_id = max(ids, default=0)
        refuse(
            max_id >= self.vocab_size,
            f"{origin}: token id {max_id} is out of range: the model has {self.vocab_size} embeddings; does the "
            "tokenizer belong to another model?",
        )

    def encode_following_messages(self, messages: Messages, origin: str, *, end_id: int | None) -> list[int]:
        """Return the ids of messages after a sampled assistant message, up to the next assistant message's start.

        The ids begin where the sampled message ends. The sampled message itself is never rendered, because the template
        might change its text (`render_after_answer`).

        end_id: the sampled message's last id if the model ended the message; None if the message was truncated. If the
        template closes assistant messages with this id, the returned ids begin after the id. Raises InputError, naming
        `origin` and the tokenizer's folder, if the last message is an assistant message, or if the template rejects or
        drops a message.
        """
        refuse(
            messages[-1]["role"] == "assistant",
            f"{origin}: generate(after=...): the last message is an assistant message, but the model samples "
            "the assistant turn; to prefill that turn, append its start as text",
        )
        marked, _, marks = replace_with_placeholders(messages)
        placeholder_text = self.render_after_answer(marked, origin)
        self._check_placeholders_rendered(marks, placeholder_text, origin)
        ids = self.encode_appended(self.render_after_answer(messages, origin), origin)
        # The tokens that the template writes between the assistant message and the first message after it.
        separator_ids = self.encode_appended(placeholder_text.partition(next(iter(marks)))[0], origin)
        # The message may instead have ended at a stop string, so its last token may be an ordinary one that also occurs
        # in the separator.
        if end_id in separator_ids and (end_id in self.chat_stop_ids or end_id == separator_ids[0]):
            return ids[separator_ids.index(end_id) + 1 :]
        return ids

    def render_after_answer(self, messages: Messages, origin: str) -> str:
        """Return the text that the chat template writes for the given messages after an assistant message.

        The text ends with the start of the next assistant message. The method renders a user message, a one-word
        assistant message and the given messages, then strips everything up to and including that word. Raises
        InputError, naming `origin`, if the template rejects the conversation or does not render the word.
        """
        conversation = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": _ANSWER},
            *messages,
        ]
        text = self.render(conversation, origin, is_prompt=True)
        _, answer, after = text.partition(_ANSWER)
        refuse(
            not answer,
            f"{origin}: the chat template of {self.folder} does not render an assistant message's text verbatim; "
            "append text or token ids instead",
        )
        return after

    def render_checked(self, messages: Messages, origin: str, *, is_prompt: bool) -> str:
        """Render messages with the chat template, and check that every message, tool call and tool appears.

        Raises InputError if a message, tool call or tool is missing, or if the template rejects the messages. Some
        templates silently drop tools and unknown roles. To detect dropped parts, the messages are also rendered with
        each text replaced by a unique placeholder, and every placeholder must appear in the output.
        """
        text = self.render(messages, origin, is_prompt=is_prompt)
        marked, tools, marks = replace_with_placeholders(messages, self.tools)
        marked_text = self.with_tools(tools).render(marked, origin, is_prompt=is_prompt)
        self._check_placeholders_rendered(marks, marked_text, origin)
        return text

    def render(self, messages: Messages, origin: str, *, is_prompt: bool) -> str:
        """Render messages and tools with the chat template and its arguments.

        A prompt ends with the generation prompt, unless its last message is an assistant message. In that case, the
        completion continues the message, as in TRL. Raises InputError, naming `origin` and the folder, if the template
        rejects the messages.
        """
        if self.backend.chat_template is None:
            hint = "leave out --chat" if self.chat else "use text prompts"
            raise InputError(f"{origin}: a chat prompt, but this tokenizer has no chat template; {hint}")
        continues_last_message = is_prompt and messages[-1]["role"] == "assistant"
        try:
            return self.backend.apply_chat_template(
                # Templates expect text, but a tool result may be a list.
                [{**message, "content": str(message["content"])} for message in messages],
                tools=self.tools or None,
                tokenize=False,
                add_generation_prompt=is_prompt and not continues_last_message,
                continue_final_message=continues_last_message,
                **self.template_arguments,
            )
        except Exception as error:
            # A chat template is code from the model folder, so rendering may raise any exception.
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            raise InputError(
                f"{origin}: the chat template of {self.folder} rejects the messages: {reason}; change the "
                "messages or the template"
            ) from None

    def _check_placeholders_rendered(self, marks: Mapping[str, str], text: str, origin: str) -> None:
        """Raise InputError for the first placeholder of `replace_with_placeholders` missing from a rendered text."""
        for mark, description in marks.items():
            refuse(
                mark not in text,
                f"{origin}: the chat template of {self.folder} does not render {description}; use another role "
                "for it, or plain text",
            )

    def check_template_arguments(self) -> None:
        """Raise InputError for an argument in --chat-template-kwargs that the chat template does not use."""
        for name in self.template_arguments:
            refuse(
                not re.search(rf"\b{re.escape(name)}\b", str(self.backend.chat_template)),
                f"--chat-template-kwargs: the chat template of {self.folder} does not use {name!r}; leave it out",
            )

    def _turn_end_ids(self) -> set[int]:
        """Return a set with the id of the special token that the chat template writes after an assistant message.

        The set is empty if there is no such token, or if one of `stop_ids` already follows an assistant message.
        """
        try:
            text = self.render_after_answer([{"role": "user", "content": _MARK}], str(self.folder))
        except InputError:  # the template rejects this conversation
            return set()
        following_ids = self.encode_appended(text.partition(_MARK)[0].lstrip(), str(self.folder))
        has_stop_id = not self.stop_ids.isdisjoint(following_ids)
        return set() if has_stop_id else set(following_ids[:1]) & self.backend.added_tokens_decoder.keys()


def replace_with_placeholders(
    messages: Messages, tools: Sequence[dict[str, Any]] = ()
) -> tuple[Messages, list[dict[str, Any]], dict[str, str]]:
    """Replace texts, and the names of tools and called functions, with unique placeholders.

    Return copies of the messages and tool schemas, and a dict that maps each placeholder to a description of the part
    it replaces.
    """
    messages, schemas = copy.deepcopy((messages, list(tools)))
    marks: dict[str, str] = {}

    def make_placeholder(description: str) -> str:
        placeholder = _MARK.format(len(marks))
        marks[placeholder] = description
        return placeholder

    for message in messages:
        role = message["role"]
        calls = message.get("tool_calls", ())
        for call in calls:
            call["function"]["name"] = make_placeholder(f"a tool call of a message of role {role!r}")
        if message["content"] or not calls:
            message["content"] = make_placeholder(f"a message of role {role!r} at its position")
    for schema in schemas:
        schema["function"]["name"] = make_placeholder(f"the tool {schema['function']['name']}")
    return messages, schemas, marks
