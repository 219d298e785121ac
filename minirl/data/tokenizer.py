"""A model folder's tokenizer: text to token ids and back.

Both are exact where a sequence is made or read in parts, which tokenizers are not: SentencePiece writes a space before
each text, and drops the first space of what it decodes.
"""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minirl.errors import InputError, refuse
from minirl.files.json_files import read_json_object
from minirl.model.folders import model_file

# A model folder with a tokenizer has at least one of these files.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# Texts behind which others are tokenized. An anchor is ruled out if a token spans its end.
ANCHORS = ("\n", "a", "0", ".")
DECODED_ANCHOR = "a"
# A decoder writes this for bytes that are not a character, and `decode` for an id that is no token.
_REPLACEMENT = "\ufffd"
# Tokens of a turn's tail beyond those that a stop string can span. At the start of the tail a token may decode
# differently (without its space), and some text appears only with the next token.
_MARGIN = 4


class Tokenizer:
    """Text to token ids and back.

    stop_ids: the ids that end a completion, from the model's files. known_ids: the ids of tokens; there may be holes
    between them, as a model may have embeddings for ids that are no token. bos_ids, eos_ids: the special tokens that
    the tokenizer puts around a text.
    """

    def __init__(self, folder: Path):
        """Load the tokenizer. Raises InputError naming the folder if it has none that can be loaded."""
        from transformers import AutoTokenizer

        source = model_file(folder, "tokenizer_config.json").parent
        # Without any of these files transformers makes an empty tokenizer.
        has_one = any((source / name).is_file() for name in TOKENIZER_FILES)
        refuse(not has_one, f"{folder}: has no tokenizer ({', '.join(TOKENIZER_FILES)})")
        try:
            self.backend: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:
            # A tokenizer with its own code, a missing package, or a corrupt file, which may raise anything.
            raise InputError(f"{folder}: its tokenizer cannot be loaded: {str(error)[:300]}") from None
        self.folder = folder
        self.stop_ids = find_stop_ids(folder, self.backend.eos_token_id)
        self.known_ids = frozenset(self.backend.get_vocab().values())
        self._anchor_ids = self.encode_text(DECODED_ANCHOR, str(folder))
        self._anchor_texts = [self._decode(self._anchor_ids, is_skipped) for is_skipped in (False, True)]
        with_special_ids = list(self.backend(DECODED_ANCHOR)["input_ids"])
        first = with_special_ids.index(self._anchor_ids[0]) if self._anchor_ids else len(with_special_ids)
        self.bos_ids = with_special_ids[:first]
        self.eos_ids = with_special_ids[first + len(self._anchor_ids) :]

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """The special tokens, by their ids."""
        added = self.backend.added_tokens_decoder.items()
        return {i: str(token) for i, token in added if token.special}

    def encode_text(self, text: str, origin: str) -> list[int]:
        """Return the token ids of a text alone, with only the special tokens that it spells out.

        Raises InputError naming `origin` if it cannot be tokenized.
        """
        try:
            return list(self.backend(text, add_special_tokens=False)["input_ids"])
        except Exception as error:
            # For example half of a surrogate pair, which is not a character, or a corrupt vocabulary.
            reason = ascii(str(error))[:100]
            raise InputError(
                f"{origin}: the text cannot be tokenized: {ascii(text)[:80]}: {reason}"
            ) from None

    def with_bos(self, ids: list[int]) -> list[int]:
        """Return the ids of a text at the beginning of a sequence: the BOS token comes first, once."""
        has_bos = ids[: len(self.bos_ids)] == self.bos_ids  # the text spells it out
        return ids if has_bos else self.bos_ids + ids

    def encode_appended(self, text: str, origin: str) -> list[int]:
        """Return the token ids of a text that follows other tokens, where they decode to exactly this text.

        It is tokenized behind an anchor, whose ids are cut off, so that it gets no first space. Raises InputError
        naming `origin` if the text cannot be tokenized.
        """
        if not text:
            return []
        for anchor in ANCHORS:
            before = self.encode_text(anchor, origin)
            ids = self.encode_text(anchor + text, origin)
            # Some tokenizers read a line end as a space.
            is_kept = before and self._decode(before, False).removeprefix(" ") == anchor
            if is_kept and ids[: len(before)] == before:
                return ids[len(before) :]
        return self.encode_text(text, origin)

    def decode(self, ids: Sequence[int] | NDArray[np.int64], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids that follow others, an array [L] or a list, without special tokens or with them.

        It is the text of all ids minus that of the ids before, so it keeps its first space. An id that is no token (the
        model's vocabulary may be padded) becomes U+FFFD. Without that, a wrong completion could get the reward of a
        right one.
        """
        parts = []
        for is_known, group in itertools.groupby(np.asarray(ids).tolist(), key=self.known_ids.__contains__):
            part = list(group)
            if is_known:
                text = self._decode(self._anchor_ids + part, skip_special_tokens)
                parts.append(text.removeprefix(self._anchor_texts[skip_special_tokens]))
            else:
                parts.append(_REPLACEMENT * len(part))
        return "".join(parts)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.backend.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


def find_stop_ids(folder: Path, eos_id: int | None) -> frozenset[int]:
    """Return `eos_id` of the tokenizer and the stop ids of config.json and generation_config.json.

    Raises InputError naming the file that cannot be read.
    """
    stop_ids: set[Any] = {eos_id}
    for name in ("config.json", "generation_config.json"):
        path = model_file(folder, name)
        # One id, a list of ids, or null.
        listed = read_json_object(path).get("eos_token_id") if path.is_file() else None
        ids = listed if isinstance(listed, list) else [listed]
        refuse(
            any(i is not None and (type(i) is not int or i < 0) for i in ids),
            f"{path}: eos_token_id is {listed!r}; expected a token id or a list of them",
        )
        stop_ids.update(ids)
    return frozenset(stop_ids - {None})


def is_stop_string(value: Any) -> bool:
    """Whether `value` can end a turn: "" is in every text, U+FFFD and half a surrogate pair are in none."""
    is_text = isinstance(value, str) and bool(value)
    return is_text and all(c != _REPLACEMENT and not "\ud800" <= c <= "\udfff" for c in value)


class StopStrings:
    """A `rollouts.StopTest`: whether one of these strings ends with the token sampled last.

    A string may begin and end inside a token; the token in which it ends is the turn's last and is kept whole. The
    text is decoded from the turn's first token, with special tokens ("<|im_end|>" can be a stop string) and all
    spaces. Only its tail is decoded: every token adds at least a byte, so a string of n bytes spans at most n tokens.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]):
        """strings: one or more, each an `is_stop_string`."""
        self.strings = strings
        self.max_tokens = max(len(string.encode()) for string in strings) + _MARGIN
        self._tokenizer = tokenizer
        # "<0x0A>" and the like, of tokenizers whose decoder joins runs of such tokens to characters.
        backend = tokenizer.backend
        byte_ids = backend.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        self._byte_ids = set(byte_ids) - {None, backend.unk_token_id}

    def __call__(self, turns: Sequence[list[int]]) -> list[bool]:
        """Return for each turn whether a string ends with its last id. A turn: its ids, or their last `max_tokens`."""
        return [self.find_stop_string(ids) is not None for ids in turns]

    def find_stop_string(self, ids: list[int]) -> str | None:
        """Return the first of the strings that ends with the last of these ids (as in `__call__`), or None."""
        tail = ids[-self.max_tokens :]
        # No string has an id that is no token, and after one the text starts over (`Tokenizer.decode`).
        known_ids = self._tokenizer.known_ids
        first = max((i for i, token in enumerate(tail, 1) if token not in known_ids), default=0)
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
