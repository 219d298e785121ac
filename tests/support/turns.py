"""Turns with the texts that a test gives them."""

from minirl.episodes.turn import BranchTokens, Turn


def told_turn(start, ids, text, **facts):
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
    turn = Turn(
        start, len(ids), appended=[], tokenizer=None, tokens=BranchTokens(), first=0, answer_first=0, **given
    )
    vars(turn).update({**read, **facts})
    return turn
