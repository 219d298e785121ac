"""Stop strings: find them in the text of a turn's sampled tokens."""

import itertools
from collections.abc import Sequence

from minirl.data.tokenizer import Tokenizer

# A decoder writes this for bytes that are not a character.
_REPLACEMENT = "\ufffd"
# Tokens of the tail beyond those that a string can span. At the start of the tail a token may decode differently
# (without its space), and some text appears only with the next token.
_MARGIN = 4


class StopStrings:
    """A `rollouts.StopTest`: does one of these strings end with the token sampled last?

    A string may begin and end inside a token; the token in which it ends is the turn's last and is kept whole. The
    text is decoded from the turn's first token, with special tokens ("<|im_end|>" can be a stop string) and all
    spaces. Only its tail is decoded: every token adds at least a byte, so a string of n bytes spans at most n tokens.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]):
        """strings: one or more, each a `task.is_stop_string`."""
        self.strings = strings
        self.max_tokens = max(len(string.encode()) for string in strings) + _MARGIN
        self._tokenizer = tokenizer
        # "<0x0A>" and the like, of tokenizers whose decoder joins runs of such tokens to characters.
        backend = tokenizer.backend
        byte_ids = backend.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        self._byte_ids = set(byte_ids) - {None, backend.unk_token_id}

    def __call__(self, turns: Sequence[list[int]]) -> list[bool]:
        """Return for each turn whether a string ends with its last id. A turn: its ids, or their last `max_tokens`."""
        return [self.found(ids) is not None for ids in turns]

    def found(self, ids: list[int]) -> str | None:
        """Return the first of the strings that ends with the last of these ids (as in `__call__`), or None."""
        tail = ids[-self.max_tokens :]
        # No string has an id that is no token, and after one the text starts over (`Tokenizer.decode`).
        known = self._tokenizer.known_ids
        first = max((i + 1 for i, token in enumerate(tail) if token not in known), default=0)
        # A run of byte tokens decodes to U+FFFD if a part is not a character, as in a tail that begins within one.
        # A string in the run begins at one of its tokens.
        byte_starts = (i for i in range(first + 1, len(tail)) if tail[i] in self._byte_ids)
        for start in itertools.chain([first], byte_starts):
            text = self._tokenizer.decode(tail[start:], skip_special_tokens=False)
            # One that an earlier token completed ended the turn there.
            string = next((string for string in self.strings if string in text), None)
            if string is not None or _REPLACEMENT not in text:
                return string
        return None
