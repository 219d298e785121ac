"""GSM8K grade-school maths (arXiv:2110.14168) from its JSONL files with `question` and `answer`.

The reward is strict: the number after the last "####" must equal the reference's. The flexible score takes the last
number of the completion; it is logged only, since the two differ widely before a model has learnt the format.
"""

import re
from collections.abc import Sequence
from typing import Any

from minirl.data.jsonl import read_objects
from minirl.data.task import Row, Task
from minirl.errors import InputError

INSTRUCTION = '\nThink step by step, then write the final answer after "####".'
_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"


def load_gsm8k(data: str, eval_data: str | None) -> Task:
    """The task from `train.jsonl` and, for evaluation, `test.jsonl`."""
    return Task(
        "gsm8k",
        read_gsm8k(data),
        read_gsm8k(eval_data) if eval_data else [],
        {"strict": strict_score},
        max_new_tokens=512,
        extra_scores={"flexible": flexible_score},
    )


def read_gsm8k(path: str) -> list[Row]:
    """Rows with the question as prompt and the reference number as `answer`. InputError names file, line and field."""
    rows = []
    for place, fields in read_objects(path):
        for name in ("question", "answer"):
            if not isinstance(fields.get(name), str) or not fields[name].strip():
                raise InputError(f"{place}: field {name!r} is {fields.get(name)!r}; expected text")
        answer = strict_answer(fields["answer"])
        if answer is None:
            raise InputError(f"{place}: field 'answer' has no number after '####'")
        rows.append(Row(fields["question"] + INSTRUCTION, {"answer": answer}, place))
    return rows


def strict_answer(text: str) -> float | None:
    """The number after the last "####", if the text ends there."""
    _, marker, last = text.rpartition("####")
    found = re.fullmatch(_NUMBER, last.strip().removesuffix(".").rstrip()) if marker else None
    return _to_number(found.group()) if found else None


def flexible_answer(text: str) -> float | None:
    """The last number of the text."""
    found = re.findall(_NUMBER, text)
    return _to_number(found[-1]) if found else None


def _to_number(text: str) -> float:
    return float(text.replace(",", "").replace("$", ""))


def strict_score(completions: Sequence[Any], answer: Sequence[float]) -> list[float]:
    """1 where the strict answer is right, else 0."""
    return [float(strict_answer(_text(c)) == a) for c, a in zip(completions, answer, strict=True)]


def flexible_score(completions: Sequence[Any], answer: Sequence[float]) -> list[float]:
    """1 where the flexible answer is right, else 0."""
    return [float(flexible_answer(_text(c)) == a) for c, a in zip(completions, answer, strict=True)]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]
