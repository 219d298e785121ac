"""A bundled task: sort a string of 4 to 8 digits.

There are over 10^8 such strings, and the held-out strings never appear in training.
"""

import random

from minirl.data.task import Row, Task, exact_match_reward

ALPHABET = "0123456789="
MIN_DIGITS = 4
MAX_DIGITS = 8
# The reward is 1 if a completion is exactly the sorted string, else 0.
score = exact_match_reward(str)


def load_sorting(*, num_train: int = 20_000, num_eval: int = 256) -> Task:
    """Generate the task from distinct random strings. Held-out strings are never trained on."""
    generator = random.Random(0)
    # A dict serves as an ordered set.
    strings: dict[str, None] = {}
    while len(strings) < num_train + num_eval:
        length = generator.randint(MIN_DIGITS, MAX_DIGITS)
        digits = [generator.choice("0123456789") for _ in range(length)]
        strings["".join(digits)] = None
    rows = [
        Row(f"{string}=", {"answer": "".join(sorted(string))}, f"sorting:{i}")
        for i, string in enumerate(strings)
    ]
    return Task(
        name="sorting",
        train_rows=rows[num_eval:],
        eval_sets={"sorting": rows[:num_eval]},
        rewards={"exact": score},
        max_new_tokens=MAX_DIGITS + 2,
        extract_answer=str,
    )
