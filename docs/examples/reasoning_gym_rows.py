"""Convert reasoning-gym tasks to rows, and use their scoring as a reward.

python docs/examples/reasoning_gym_rows.py basic_arithmetic 1000 > rows.jsonl
torchrun train_grpo.py --data rows.jsonl --reward docs/examples/reasoning_gym_rows.py:score --chat
"""

import json
import sys

import reasoning_gym
from reasoning_gym.utils import extract_answer

ASK = "\nWrite the answer between <answer> and </answer>."


def score(completions, entry):
    """Return scores from 0 to 1 from the scoring functions of the rows' datasets."""
    return [scorer_of(one)(extract_answer(text), one) for text, one in zip(completions, entry, strict=True)]


def scorer_of(entry):
    """Return the scoring function of the entry's dataset."""
    return reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])


if __name__ == "__main__":
    for entry in reasoning_gym.create_dataset(sys.argv[1], size=int(sys.argv[2]), seed=0):
        print(json.dumps({"prompt": entry["question"] + ASK, "entry": entry}))
