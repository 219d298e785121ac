"""Turns with the texts that a test gives them."""

from minirl.episodes.remote import ToldTurn


def told_turn(start, ids, text, **facts):
    """A turn of these ids and this text, which is its answer too."""
    given = {
        "finish_reason": "stop",
        "appended": [],
        "logprobs": [0.0] * len(ids),
        "versions": [0] * len(ids),
    }
    return ToldTurn(start, len(ids), ids=ids, text=text, answer=text, **{**given, **facts})
