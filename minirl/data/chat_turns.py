"""Messages behind an answer that was sampled: the tokens that the chat template writes there.

The answer itself is not rendered, as a template may write it otherwise than it was sampled. A conversation of a user's
message, an answer that is one word, and the new messages is rendered in its place; what follows the word is appended.
"""

from collections.abc import Sequence
from typing import Any

from minirl.data.task import Messages
from minirl.data.tokenizer import Tokenizer
from minirl.errors import refuse

# Words, that a template may not mistake for anything else.
_ANSWER = "minirlanswer"
_CONTENT = "minirlcontent{}end"


def is_message(value: Any) -> bool:
    """Whether it is a message, with role and content."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def following_ids(
    tokenizer: Tokenizer, messages: Sequence[Any], place: str, *, end_id: int | None
) -> list[int]:
    """The token ids of messages behind an answer, from the answer's end to the beginning of the next answer.

    end_id: the last id of the answer if it ended by itself, None if it was cut off. Where the template closes an answer
    with this id, nothing is repeated up to it. Raises InputError naming `place` and the tokenizer's folder for what are
    no messages, and for those that the template refuses or does not show.
    """
    checked = _checked(messages, place)
    marks = [_CONTENT.format(i) for i in range(len(checked))]
    outline = _behind_answer(
        tokenizer, [{**message, "content": mark} for message, mark in zip(checked, marks, strict=True)], place
    )
    for message, mark in zip(checked, marks, strict=True):
        refuse(
            mark not in outline,
            f"{_template(tokenizer, place)} does not show a message of role {message['role']!r} behind an answer; "
            "give it another role, or append text",
        )
    ids = tokenizer.encode_text(_behind_answer(tokenizer, checked, place), place)
    # What the template writes of itself before the first message's content.
    head = tokenizer.encode_text(outline.partition(marks[0])[0], place)
    if end_id is None or end_id not in head:
        return ids
    # An ordinary token of the head may have been the end of a stop string too.
    closes = end_id in tokenizer.stop_ids or end_id == head[0]
    return ids[head.index(end_id) + 1 :] if closes else ids


def _behind_answer(tokenizer: Tokenizer, messages: Messages, place: str) -> str:
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}, *messages]
    text = tokenizer.apply_template(conversation, place, is_prompt=True)
    _, answer, behind = text.partition(_ANSWER)
    refuse(
        not answer,
        f"{_template(tokenizer, place)} does not show the text of an answer; append text or token ids",
    )
    return behind


def _checked(messages: Sequence[Any], place: str) -> Messages:
    what = f"{place}: generate(after=...)"
    for message in messages:
        refuse(
            not is_message(message),
            f"{what}: {message!r:.80} is no message; expected role and content, both text",
        )
    refuse(
        messages[-1]["role"] == "assistant",
        f"{what}: the last message is the assistant's, whose turn is to be sampled; append its beginning as text",
    )
    return list(messages)


def _template(tokenizer: Tokenizer, place: str) -> str:
    return f"{place}: the chat template of {tokenizer.folder}"
