"""A bundled tool-use task: multiply two three-digit numbers with a calculator.

A completion may call the tool: `<calc>12*34</calc>`. The rollout function in docs/examples/calculator.py
appends the product and "=". Without that rollout function, tool calls get no result.
"""

import random
from collections.abc import Sequence

from minirl.data.task import Row, Task, exact_match_reward

CALL_TOKENS = ("<calc>", "</calc>")
# A tool call, the tool result and an answer take at most 23 tokens.
MAX_NEW_TOKENS = 32
# Fraction of warm-start examples whose first turn calls the calculator; all other examples answer directly.
CALL_FREQUENCY = 0.05


def last_answer(completion: str) -> str:
    """Return the text after the last tool result, or the whole text if it contains no tool result."""
    return completion.rpartition("=")[2]


score = exact_match_reward(last_answer)


def load_calculator(*, num_train: int = 4000, num_eval: int = 256) -> Task:
    """Generate the task from distinct random operand pairs. Held-out pairs are never trained on."""
    generator = random.Random(0)
    # A dict serves as an ordered set.
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < num_train + num_eval:
        pairs[generator.randint(100, 999), generator.randint(100, 999)] = None
    rows = [
        Row(f"{first}*{second}=", {"answer": str(first * second)}, f"calculator:{i}")
        for i, (first, second) in enumerate(pairs)
    ]
    return Task(
        name="calculator",
        train_rows=rows[num_eval:],
        eval_sets={"calculator": rows[:num_eval]},
        rewards={"exact": score},
        max_new_tokens=MAX_NEW_TOKENS,
        extra_scores={"calls": has_call},
        extract_answer=last_answer,
        warm_start_rows=_examples(rows[num_eval:], generator),
    )


def has_call(completions: Sequence[str]) -> list[float]:
    """Return 1 for each completion that calls the calculator, else 0. The score is logged, not trained on."""
    return [float("</calc>" in completion) for completion in completions]


def _examples(rows: Sequence[Row], generator: random.Random) -> list[Row]:
    """Return three examples per row: a first turn, the text of a tool call, and an answer that follows the result."""
    examples = []
    for row in rows:
        prompt = str(row.prompt)
        product = row.columns["answer"]
        prompt_with_open_tag = f"{prompt}<calc>"
        call = f"{prompt[:-1]}</calc>"
        begins_with_call = generator.random() < CALL_FREQUENCY
        for before, after in (
            (prompt, f"<calc>{call}" if begins_with_call else product),
            (prompt_with_open_tag, call),
            (f"{prompt_with_open_tag}{call}{product}=", product),
        ):
            examples.append(Row(before, {"answer": after}, row.origin))
    return examples
