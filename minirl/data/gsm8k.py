"""GSM8K, grade-school maths (arXiv:2110.14168), from its JSONL files with the fields `question` and `answer`.

The reward is the strict score: the number after the last "####" must equal that of the reference. The
flexible score takes the last number of the completion. It is only logged: before a model has learnt the
format, the two differ widely.
"""

import re
from collections.abc import Sequence
from typing import Any

from minirl.data.jsonl import rows_of
from minirl.data.task import Row, Task, exact_score
from minirl.errors import InputError

INSTRUCTION = '\nThink step by step, then write the final answer after "####".'
_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"


def strict_answer(text: str) -> float | None:
    """Return the number after the last "####", or None unless the text ends with it."""
    _, marker, last = text.rpartition("####")
    if not marker:
        return None
    # A full stop after the number is accepted.
    candidate = last.strip().removesuffix(".").rstrip()
    match = re.fullmatch(_NUMBER, candidate)
    return _to_number(match.group()) if match else None


def flexible_answer(text: str) -> float | None:
    """Return the last number of the text, or None if it has no number."""
    numbers = re.findall(_NUMBER, text)
    return _to_number(numbers[-1]) if numbers else None


def _to_number(text: str) -> float:
    return float(text.replace(",", "").replace("$", ""))


strict_score = exact_score(strict_answer)
flexible_score = exact_score(flexible_answer)


def load_gsm8k(data: str, eval_data: Sequence[str]) -> Task:
    """Load the task from `train.jsonl` and, for evaluation, `test.jsonl`."""
    return Task(
        name="gsm8k",
        train_rows=read_gsm8k(data),
        eval_sets={path: read_gsm8k(path) for path in eval_data},
        rewards={"strict": strict_score},
        max_new_tokens=512,
        extra_scores={"flexible": flexible_score},
        answer_of=strict_answer,
    )


def read_gsm8k(path: str) -> list[Row]:
    """Read rows with the question as prompt and the reference number as column `answer`.

    Raises InputError naming file, line and field of the first bad row.
    """
    return rows_of(path, _to_row)


def _to_row(fields: dict[str, Any], place: str) -> Row:
    for name in ("question", "answer"):
        value = fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{place}: field {name!r} is {value!r}; expected text")
    answer = strict_answer(fields["answer"])
    if answer is None:
        raise InputError(f"{place}: field 'answer' has no number after '####'")
    return Row(fields["question"] + INSTRUCTION, {"answer": answer}, place)
