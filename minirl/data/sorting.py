"""The embedded task: sort a string of 4 to 8 digits. There are over 10^8 strings, so held-out ones are really new."""

import random
from collections.abc import Sequence

from minirl.data.task import Row, Task

ALPHABET = "0123456789="
MIN_DIGITS, MAX_DIGITS = 4, 8


def load_sorting(*, num_train: int = 20_000, num_eval: int = 256, seed: int = 0) -> Task:
    """Distinct random strings; the held-out ones are none of those trained on."""
    rng = random.Random(seed)
    strings: dict[str, None] = {}
    while len(strings) < num_train + num_eval:
        strings["".join(rng.choice("0123456789") for _ in range(rng.randint(MIN_DIGITS, MAX_DIGITS)))] = None
    rows = [Row(f"{s}=", {"answer": "".join(sorted(s))}, f"sorting:{i}") for i, s in enumerate(strings)]
    return Task("sorting", rows[num_eval:], rows[:num_eval], {"exact": score}, max_new_tokens=MAX_DIGITS + 2)


def score(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 for the sorted string and nothing else, else 0."""
    return [
        float(completion == sorted_string)
        for completion, sorted_string in zip(completions, answer, strict=True)
    ]
