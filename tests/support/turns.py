"""Turns with the texts that a test gives them."""

from minirl.episodes.turn import BranchTokens, Turn
from minirl.errors import InputError


class UnreadableTurn(Turn):
    """A turn of a model whose messages nobody can read."""

    @property
    def message(self):
        raise InputError("no response template")


def told_turn(start, ids, text, *, kind=Turn, **facts):
    """A turn of these ids and this text, which is its answer too."""
    read = {
        "ids": ids,
        "text": text,
        "answer": text,
        "logprobs": [0.0] * len(ids),
        "versions": [0] * len(ids),
    }
    given = {
        "finish_reason": "stop",
        **{name: facts.pop(name) for name in ("branch", "inserted") if name in facts},
    }
    turn = kind(
        start, len(ids), appended=[], tokenizer=None, tokens=BranchTokens(), first=0, answer_first=0, **given
    )
    vars(turn).update({**read, **facts})
    return turn
