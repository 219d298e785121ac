"""Convert a rollout's tokens to a conversation for reward functions, rollouts.jsonl and `minirl.extras.show`.

Conversations are decoded on demand, because most are read once or never.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

from minirl.data import answers
from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.messages import Messages, add_answer, as_messages, is_token_ids
from minirl.errors import InputError
from minirl.rollouts import Rollout, TurnRecord

Turn = TypeVar("Turn", bound=TurnRecord)


def conversation_record(rollout: Rollout, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return a rollout's messages, segments and turns as JSON values.

    messages: the conversation of the last branch; [] if that branch begins with token ids. segments: all tokens after
    the row's prompt, branch by branch, with special tokens as text; the sampled segments are the turns. Returns {} for
    a rollout without tools that consists of a single answer to the prompt.
    """
    first, *later_turns = turns = rollout.episode.turns
    is_one_answer = not later_turns and first.start == first.branch == 0 and first.parse_error is None
    if is_one_answer and not tokenizer.with_tools(rollout.episode.tools).tools:
        return {}
    return {
        "messages": rollout_messages(rollout, tokenizer),
        "segments": list(_segments(rollout, tokenizer)),
        "turns": [turn.json_fields() for turn in turns],
    }


def completion_messages(rollout: Rollout, tokenizer: ChatTokenizer) -> Messages:
    """Return the rollout's messages minus any leading messages from the row's prompt.

    During a rollout, the prompt's last message may be extended by text from an environment's `reset` or by the
    completion.
    """
    messages = rollout_messages(rollout, tokenizer)
    if not messages:
        return [{"role": "assistant", "content": tokenizer.decode(rollout.completion)}]
    *earlier, last = as_messages(rollout.episode.row.prompt)
    for prompt_message in earlier:
        if not messages or any(messages[0][key] != prompt_message[key] for key in ("role", "content")):
            return messages
        del messages[0]
    first_message = messages[0]
    if first_message["role"] == last["role"] and str(first_message["content"]).startswith(
        str(last["content"])
    ):
        if last["role"] == "assistant":  # what follows the prompt's text is the completion, even if empty
            first_message["content"] = first_message["content"].removeprefix(last["content"])
        else:
            del messages[0]
    return messages


def rollout_messages(rollout: Rollout, tokenizer: ChatTokenizer) -> Messages:
    """Return the conversation of a rollout's last branch in TRL's format; [] if the branch begins with token ids.

    Messages contain no special tokens. With tools, an assistant message that consists of one whole turn includes the
    turn's tool calls.
    """
    branch_prompt = rollout.episode.prompt
    if branch_prompt is None or is_token_ids(branch_prompt):
        return []
    tokenizer = tokenizer.with_tools(rollout.episode.tools)
    branch = rollout.branches[-1]
    turns = [turn for turn in rollout.episode.turns if turn.branch == branch.rollout_id.branch]

    def assistant_message(turn: TurnRecord, start: int) -> str | dict[str, Any]:
        ids = branch.tokens_after_prompt["id"][start : turn.end].tolist()
        text = tokenizer.decode(ids)
        if not tokenizer.tools or start != turn.start:
            return text
        preceding_tokens = branch.tokens[: branch.num_prompt_tokens + start]
        try:
            message = answers.parse_assistant_message(tokenizer, ids, preceding_tokens)
        except InputError:  # the model's tool-call format is unknown
            return text
        # Keep the text, which shows the malformed call.
        return message if message.pop("parse_error", None) is None else message | {"content": text}

    return branch_messages(cast(str | Messages, branch_prompt), turns, assistant_message)


def branch_messages(
    prompt: str | Messages,
    turns: Sequence[Turn],
    assistant_message: Callable[[Turn, int], str | dict[str, Any]],
) -> Messages:
    """Return the messages of a branch: its prompt, the appended messages and the assistant messages.

    assistant_message: function that takes a message's last turn and the index of the message's first token (counted
    from the end of the branch's prompt), and returns an assistant message as text or as a dict. An assistant message
    spans all turns up to the next appended messages.
    """
    messages = [dict(message) for message in as_messages(prompt)]
    message_start = 0
    for i, turn in enumerate(turns):
        if turn.inserted:
            messages += (dict(message) for message in turn.inserted)
            message_start = turn.start
        # Without appended messages, the assistant message continues in the next turn.
        if i + 1 == len(turns) or turns[i + 1].inserted:
            add_answer(messages, assistant_message(turn, message_start))
    return messages


def _segments(rollout: Rollout, tokenizer: ChatTokenizer) -> Iterator[dict[str, Any]]:
    """Yield each branch's segments in order: its prompt, except in the first branch, then appended tokens and turns."""
    for branch in rollout.branches:
        branch_number = branch.rollout_id.branch
        previous_end = branch.num_prompt_tokens
        segments = [("prompt", 0, previous_end)] if branch_number > 0 else []
        for turn in rollout.episode.turns:
            if turn.branch == branch_number:
                segment_start = branch.num_prompt_tokens + turn.start
                segments += [
                    ("environment", previous_end, segment_start),
                    ("sampled", segment_start, segment_start + turn.num_tokens),
                ]
                previous_end = segment_start + turn.num_tokens
        for kind, segment_start, previous_end in segments:
            if previous_end > segment_start:
                text = tokenizer.decode(branch.tokens[segment_start:previous_end], skip_special_tokens=False)
                yield {
                    "kind": kind,
                    "text": text,
                    "num_tokens": previous_end - segment_start,
                    "branch": branch_number,
                }
