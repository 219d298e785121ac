"""Turns with the texts that a test gives them."""


class SaidReader:
    """Reads a turn of these ids and this text, which is its answer too (`episode.TurnReader`). message: makes it."""

    def __init__(self, ids, text, message, logprob=0.0):
        self.ids = ids
        self.logprobs = [logprob] * len(ids)
        self.versions = [0] * len(ids)
        self.text = self.answer = text
        self.make_message = message

    @property
    def message(self):
        return self.make_message()
