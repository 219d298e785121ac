"""The tokens that the chat template writes for messages after a sampled answer.

The template might write the sampled answer differently, so the answer is never rendered. Instead the template renders a
user's message, a one-word answer and the new messages, and the text after that word is appended.
"""

from collections.abc import Sequence
from typing import Any

from minirl.data.task import Messages, is_message
from minirl.data.tokenizer import Tokenizer
from minirl.errors import refuse

# Words that no template mistakes for something else.
_ANSWER = "minirlanswer"
_CONTENT = "minirlcontent{}end"


def following_ids(
    tokenizer: Tokenizer, messages: Sequence[Any], place: str, *, end_id: int | None
) -> list[int]:
    """Return the token ids of messages after an answer, from the answer's end to the start of the next answer.

    end_id: the answer's last id if the model ended it, None if it was cut off. If the template closes an answer with
    this id, the ids up to it are not repeated. Raises InputError naming `place` and the tokenizer's folder for values
    that are not messages, and for messages that the template refuses or does not show.
    """
    checked = _checked(messages, place)
    marks = [_CONTENT.format(i) for i in range(len(checked))]
    outline = _after_answer(
        tokenizer, [{**message, "content": mark} for message, mark in zip(checked, marks, strict=True)], place
    )
    for message, mark in zip(checked, marks, strict=True):
        refuse(
            mark not in outline,
            f"{_template(tokenizer, place)} does not show a message of role {message['role']!r} after an answer; "
            "give it another role, or append text",
        )
    ids = tokenizer.encode_text(_after_answer(tokenizer, checked, place), place)
    # The template's own text before the first message's content.
    head = tokenizer.encode_text(outline.partition(marks[0])[0], place)
    if end_id is None or end_id not in head:
        return ids
    # An ordinary token of the head may also have completed a stop string.
    closes = end_id in tokenizer.stop_ids or end_id == head[0]
    return ids[head.index(end_id) + 1 :] if closes else ids


def _after_answer(tokenizer: Tokenizer, messages: Messages, place: str) -> str:
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}, *messages]
    text = tokenizer.apply_template(conversation, place, is_prompt=True)
    _, answer, after = text.partition(_ANSWER)
    refuse(
        not answer,
        f"{_template(tokenizer, place)} does not show the text of an answer; append text or token ids",
    )
    return after


def _checked(messages: Sequence[Any], place: str) -> Messages:
    what = f"{place}: generate(after=...)"
    for message in messages:
        is_result = isinstance(message, dict) and message.get("role") == "tool"
        refuse(
            not is_message(message) and not (is_result and isinstance(message.get("content"), list)),
            f"{what}: {message!r:.80} is not a message; expected role and content, both text",
        )
    refuse(
        messages[-1]["role"] == "assistant",
        f"{what}: the last message is the assistant's, whose turn the model samples; append its beginning as text",
    )
    return list(messages)


def _template(tokenizer: Tokenizer, place: str) -> str:
    return f"{place}: the chat template of {tokenizer.folder}"
