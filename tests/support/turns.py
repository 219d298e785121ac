"""Turns that say what a test wants."""


class SaidReader:
    """Reads a turn of these ids and this text, which is its answer too (`episode.TurnReader`). message: makes it."""

    def __init__(self, ids, text, message, logprob=0.0):
        self.ids = lambda: ids
        self.logprobs = lambda: [logprob] * len(ids)
        self.versions = lambda: [0] * len(ids)
        self.text = self.answer = lambda: text
        self.message = message
