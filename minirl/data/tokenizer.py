"""A model folder's tokenizer, which converts text to token ids and back.

Encoding and decoding are both exact, even for part of a sequence. Plain tokenizers do not guarantee exactness:
SentencePiece prepends a space to each text and drops the leading space when decoding.
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
# Texts to prepend to other texts before tokenizing them. An anchor is unusable if a token spans the end of the anchor.
ANCHORS = ("\n", "a", "0", ".")
DECODED_ANCHOR = "a"
# Decoders write this character for invalid UTF-8, and `decode` also writes it for ids without a token.
_REPLACEMENT = "\ufffd"
# Extra tokens to decode beyond those that a stop string can span: the tail's first token may lose its leading space
# when decoded, and some text appears only with the next token.
_MARGIN = 4


class Tokenizer:
    """Converts text to token ids and back.

    stop_ids: the ids of the stop tokens, from the model's files. known_ids: all ids that map to a token; there may be
    gaps, because a model may have unused embeddings. bos_ids, eos_ids: the ids of the special tokens that
    the tokenizer adds before and after a text.
    """

    def __init__(self, folder: Path):
        """Load the tokenizer. Raises InputError, naming the folder, if no tokenizer can be loaded."""
        from transformers import AutoTokenizer

        tokenizer_folder = model_file(folder, "tokenizer_config.json").parent
        # Without any of these files, transformers would create an empty tokenizer.
        has_tokenizer_file = any((tokenizer_folder / name).is_file() for name in TOKENIZER_FILES)
        refuse(not has_tokenizer_file, f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)})")
        try:
            self.backend: Any = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
        except Exception as error:
            # Custom code, a missing package or a corrupt file may raise anything.
            raise InputError(f"{folder}: cannot load the tokenizer: {str(error)[:300]}") from None
        self.folder = folder
        self.stop_ids = find_stop_ids(folder, self.backend.eos_token_id)
        self.known_ids = frozenset(self.backend.get_vocab().values())
        self._anchor_ids = self.encode_text(DECODED_ANCHOR, str(folder))
        self._anchor_texts = [
            self._decode(self._anchor_ids, skips_special) for skips_special in (False, True)
        ]
        ids_with_special_tokens = list(self.backend(DECODED_ANCHOR)["input_ids"])
        anchor_start = (
            ids_with_special_tokens.index(self._anchor_ids[0])
            if self._anchor_ids
            else len(ids_with_special_tokens)
        )
        self.bos_ids = ids_with_special_tokens[:anchor_start]
        self.eos_ids = ids_with_special_tokens[anchor_start + len(self._anchor_ids) :]

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """The special tokens, keyed by id."""
        return {i: str(token) for i, token in self.backend.added_tokens_decoder.items() if token.special}

    def encode_text(self, text: str, origin: str) -> list[int]:
        """Return the token ids of a text. No special tokens are added, but the text may spell out special tokens.

        Raises InputError, naming `origin`, if the text cannot be tokenized.
        """
        try:
            return list(self.backend(text, add_special_tokens=False)["input_ids"])
        except Exception as error:
            # For example, a lone surrogate or a corrupt vocabulary.
            reason = ascii(str(error))[:100]
            raise InputError(
                f"{origin}: the text cannot be tokenized: {ascii(text)[:80]}: {reason}"
            ) from None

    def with_bos(self, ids: list[int]) -> list[int]:
        """Prepend the BOS token to the ids of a text, unless the ids already begin with BOS."""
        return ids if ids[: len(self.bos_ids)] == self.bos_ids else self.bos_ids + ids

    def encode_appended(self, text: str, origin: str) -> list[int]:
        """Return the token ids of a text that follows other tokens. The ids decode to exactly this text.

        The text is tokenized after an anchor, so no leading space is added; the anchor's ids are then removed. Raises
        InputError, naming `origin`, if the text cannot be tokenized.
        """
        if not text:
            return []
        for anchor in ANCHORS:
            anchor_ids = self.encode_text(anchor, origin)
            ids = self.encode_text(anchor + text, origin)
            # Some tokenizers turn a newline into a space.
            anchor_round_trips = anchor_ids and self._decode(anchor_ids, False).removeprefix(" ") == anchor
            if anchor_round_trips and ids[: len(anchor_ids)] == anchor_ids:
                return ids[len(anchor_ids) :]
        return self.encode_text(text, origin)

    def decode(self, ids: Sequence[int] | NDArray[np.int64], *, skip_special_tokens: bool = True) -> str:
        """Decode ids (array [L] or list) as the continuation of other ids, with or without special tokens.

        The result is the text of the whole sequence minus the text before these ids, so a leading space is kept. An id
        without a token (a model's vocabulary may be padded) becomes U+FFFD; otherwise, a wrong completion
        could be rewarded as correct.
        """
        text_parts = []
        for is_known, group in itertools.groupby(np.asarray(ids).tolist(), key=self.known_ids.__contains__):
            consecutive_ids = list(group)
            if is_known:
                text = self._decode(self._anchor_ids + consecutive_ids, skip_special_tokens)
                text_parts.append(text.removeprefix(self._anchor_texts[skip_special_tokens]))
            else:
                text_parts.append(_REPLACEMENT * len(consecutive_ids))
        return "".join(text_parts)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.backend.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


def find_stop_ids(folder: Path, eos_id: int | None) -> frozenset[int]:
    """Return the tokenizer's `eos_id` and the stop ids in config.json and generation_config.json.

    Raises InputError, naming the file, if a file cannot be read.
    """
    stop_ids: set[Any] = {eos_id}
    for name in ("config.json", "generation_config.json"):
        path = model_file(folder, name)
        # One id, a list of ids, or null.
        eos_value = read_json_object(path).get("eos_token_id") if path.is_file() else None
        ids = eos_value if isinstance(eos_value, list) else [eos_value]
        refuse(
            any(i is not None and (type(i) is not int or i < 0) for i in ids),
            f"{path}: eos_token_id is {eos_value!r}; expected a token id or a list of them",
        )
        stop_ids.update(ids)
    return frozenset(stop_ids - {None})


def is_stop_string(value: Any) -> bool:
    """Whether `value` is a usable stop string: non-empty, with no U+FFFD or lone surrogates."""
    is_text = isinstance(value, str) and bool(value)
    return is_text and all(c != _REPLACEMENT and not "\ud800" <= c <= "\udfff" for c in value)


class StopStrings:
    """A `rollouts.StopTest` that checks whether the last sampled token completes one of these strings.

    A stop string may begin and end inside a token; the token that completes a stop string is the turn's last token and
    is kept whole. The text of a turn includes special tokens ("<|im_end|>" can be a stop string) and all whitespace.
    Only the end of the text is decoded: every token adds at least one byte, so a string of n bytes spans at most n
    tokens.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]):
        """strings: one or more strings that pass `is_stop_string`."""
        self.strings = strings
        self.max_tokens = max(len(string.encode()) for string in strings) + _MARGIN
        self._tokenizer = tokenizer
        # Byte tokens such as "<0x0A>". Some decoders join consecutive byte tokens into characters.
        hf_tokenizer = tokenizer.backend
        byte_token_ids = hf_tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        self._byte_ids = set(byte_token_ids) - {None, hf_tokenizer.unk_token_id}

    def __call__(self, turns: Sequence[list[int]]) -> list[bool]:
        """Return, for each turn, whether the turn's last token completes a stop string.

        turns: each turn's ids, or only the last `max_tokens` ids of each turn.
        """
        return [self.find_stop_string(ids) is not None for ids in turns]

    def find_stop_string(self, ids: list[int]) -> str | None:
        """Return the first string that the last token completes, or None. ids: a turn's ids, as in `__call__`."""
        tail = ids[-self.max_tokens :]
        # No stop string spans an id that has no token: text matching starts over after such an id (`Tokenizer.decode`).
        known_ids = self._tokenizer.known_ids
        search_start = max((i for i, token in enumerate(tail, 1) if token not in known_ids), default=0)
        # Consecutive byte tokens decode to U+FFFD if some of them are invalid, for example if the tail begins inside a
        # character. A stop string that lies within byte tokens may begin at any of them, so each is tried as the start.
        byte_starts = (i for i in range(search_start + 1, len(tail)) if tail[i] in self._byte_ids)
        for start in itertools.chain([search_start], byte_starts):
            text = self._tokenizer.decode(tail[start:], skip_special_tokens=False)
            # A string completed by an earlier token would have ended the turn there.
            string = next((string for string in self.strings if string in text), None)
            if string is not None or _REPLACEMENT not in text:
                return string
        return None
