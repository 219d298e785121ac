"""The tokens that the chat template writes for messages after a sampled answer.

The template might write the sampled answer differently, so the answer is never rendered: another one is
(`Tokenizer.after_answer`).
"""

from minirl.data.task import Messages
from minirl.data.tokenizer import Tokenizer, marked_messages
from minirl.errors import refuse


def following_ids(tokenizer: Tokenizer, messages: Messages, place: str, *, end_id: int | None) -> list[int]:
    """Return the token ids of messages after an answer, from the answer's end to the start of the next answer.

    end_id: the answer's last id if the model ended it, None if it was cut off. If the template closes an answer with
    this id, the ids up to it are not repeated. Raises InputError naming `place` and the tokenizer's folder if the last
    message is the assistant's, and for messages that the template refuses or does not show.
    """
    refuse(
        messages[-1]["role"] == "assistant",
        f"{place}: generate(after=...): the last message is the assistant's, whose turn the model samples; append its "
        "beginning as text",
    )
    marked, marks = marked_messages(messages)
    outline = tokenizer.after_answer(marked, place)
    tokenizer.refuse_hidden(marks, outline, place)
    ids = tokenizer.encode_appended(tokenizer.after_answer(messages, place), place)
    # The template's own text before the first message.
    head = tokenizer.encode_appended(outline.partition(next(iter(marks)))[0], place)
    if end_id is None or end_id not in head:
        return ids
    # An ordinary token of the head may also have completed a stop string.
    closes = end_id in tokenizer.stop_ids_of(messages) or end_id == head[0]
    return ids[head.index(end_id) + 1 :] if closes else ids
