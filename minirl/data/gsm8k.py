"""GSM8K, grade-school maths (arXiv:2110.14168), from rows with the fields `question` and `answer`.

The reward is the strict score: the number after the last "####" must equal the reference answer. The pattern is
the dataset's own, `#### (-?[0-9.,]+)`, plus an optional $. Text after the number is ignored ("40%" is 40); a number
after a plus, a Unicode minus or markup does not match. The flexible score uses the completion's last number, with any
sign. The flexible score is only logged. Before a model has learnt the format, the two scores differ widely.

Both scores parse a number as a whole: "1/2" is 0.5 and "1.5e3" is 1,500, but neither "10-12" nor "2,3" is a number,
because commas separate thousands.
"""

import re
from collections.abc import Sequence
from typing import Any

from minirl.data.jsonl import read_rows
from minirl.data.task import Row, Task, exact_match_reward
from minirl.errors import refuse

# Default data: NAME:CONFIG:SPLIT on the Hub.
TRAIN_DATA = "openai/gsm8k:main:train"
TEST_DATA = "openai/gsm8k:main:test"
INSTRUCTION = '\nThink step by step, then write the final answer after "####".'
# The run of characters that may form a number, starting at the first digit or decimal point.
_DIGITS = r"\.?[0-9][0-9.,/eE+\u2212-]*"
# A number such as 1,234.50, 1.5e3 or 3/4, short enough to fit into a float.
_NUMBER = re.compile(
    r"([-+]?(?=\.?[0-9])(?:[0-9]{1,3}(?:,[0-9]{3}){1,30}|[0-9]{0,99})(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,2})?)"
    r"(?:/([1-9][0-9]{0,9}))?"
)


def strict_answer(text: str) -> float | None:
    """Return the number after the last "####" that precedes a digit, or None if there is no valid number."""
    return _last_number(rf"####\s*(-?\$?{_DIGITS})", text)


def flexible_answer(text: str) -> float | None:
    """Return the last number in the text.

    Return None if the text contains no digits or its last digits do not form a valid number.
    """
    return _last_number(rf"(?:(?<!\w)[-+\u2212$]{{1,2}})?{_DIGITS}", text)


def _last_number(pattern: str, text: str) -> float | None:
    """Return the pattern's last match as a number, or None if there is no match or the match is not a number."""
    candidate = "".join(re.findall(pattern, text)[-1:])
    candidate = candidate.replace("\u2212", "-").replace("$", "").rstrip(".,/eE+-")
    number = _NUMBER.fullmatch(candidate)
    return float(number[1].replace(",", "")) / int(number[2] or 1) if number else None


strict_score = exact_match_reward(strict_answer)
flexible_score = exact_match_reward(flexible_answer)


def load_gsm8k(data: str, eval_data: Sequence[str]) -> Task:
    """Load the task from training data and, for evaluation, held-out data."""
    return Task(
        name="gsm8k",
        train_rows=read_rows(data, _to_row),
        eval_sets={path: read_rows(path, _to_row) for path in eval_data},
        rewards={"strict": strict_score},
        max_new_tokens=512,
        extra_scores={"flexible": flexible_score},
        extract_answer=strict_answer,
    )


def _to_row(fields: dict[str, Any], origin: str) -> Row:
    """Convert an object to a row: `question` is the prompt and the reference number is the column `answer`.

    Raises InputError, naming the origin and the field.
    """
    question = str(fields.get("question") or "")
    refuse(not question.strip(), f"{origin}: no text in a field 'question'; the fields are {sorted(fields)}")
    answer = strict_answer(str(fields.get("answer")))
    refuse(
        answer is None,
        f"{origin}: no number after '####' in a field 'answer'; the fields are {sorted(fields)}",
    )
    return Row(question + INSTRUCTION, {"answer": answer}, origin)
