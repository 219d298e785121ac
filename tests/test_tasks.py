"""Tasks: files read whole and refused by line and field, answers extracted, held-out rows held out."""

import itertools
import json
from dataclasses import replace

import pytest

from minirl.data.gsm8k import (
    INSTRUCTION,
    flexible_answer,
    flexible_score,
    load_gsm8k,
    read_gsm8k,
    strict_answer,
    strict_score,
)
from minirl.data.jsonl import read_rows
from minirl.data.sorting import ALPHABET, load_sorting, score
from minirl.data.task import Row
from minirl.errors import InputError
from minirl.run.config import RunConfig
from minirl.run.load_task import load_task
from support.rollouts import rewards_of_call

GOOD = '{"prompt": "hello", "answer": 3}'


def eval_rows(task):
    """All held-out rows."""
    return list(itertools.chain(*task.eval_sets.values()))


@pytest.fixture
def write(tmp_path):
    """A file of these bytes or lines, by path."""

    def write_file(content, name="rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else "\n".join(content).encode())
        return str(path)

    return write_file


def test_a_missing_file_is_refused_by_name(tmp_path):
    """A file that is not there, or is a folder."""
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match=f"there is no file {path}"):
            read_rows(str(path))


# Numbers that both read, that only the flexible one reads, and that neither does.
STRICT = {
    "#### 18": 18,
    "#### 18.": 18,
    "#### 18 .\n": 18,
    "#### 18.0": 18,
    "#### 007": 7,
    "#### -7": -7,
    "#### $18": 18,
    "#### $1,234.50": 1234.5,
    "#### 2.75.": 2.75,
    "she has 3 left #### 4": 4,
    "#### 5\n#### 6": 6,
    "#### 5 or #### 7": 7,
}
FLEXIBLE = {
    "#### 5\nNo, wait.": 5,
    "#### 5 and then 6": 6,
    "a #### in the middle, then 5": 5,
    "#### 18 dollars": 18,
    "#### 50%": 50,
    "#### **5**": 5,
    "#### 3/4": 4,
    "#### 5 + 2 = 7": 7,
    "$5 + $6 = $11": 11,
    "it costs 3,000, then 4,": 4,
    "it fell to -3 degrees": -3,
}
NO_ANSWER = ("#### five", "####", "no digits at all, $ , . - ####", "")


@pytest.mark.parametrize("text", [*STRICT, *FLEXIBLE, *NO_ANSWER])
def test_answers_are_extracted_by_the_table(text):
    """Strict: the number after the last #### that ends the text. Flexible: the last number. Pitfall 19.

    Pitfalls 20 and 56.
    """
    assert strict_answer(text) == STRICT.get(text)
    assert flexible_answer(text) == (STRICT | FLEXIBLE).get(text)


def test_scores_are_of_the_completion_alone():
    """Also where the prompt holds the answer in the right format. Chats have completions too. Pitfall 19."""
    row = Row("Is it\n#### 5" + INSTRUCTION, {"answer": 5.0}, "f:1")
    texts = ["I do not know", "#### 5", "so 5", "#### 6"]
    for prompt in (row.prompt, [{"role": "user", "content": row.prompt}]):
        for function, expected in ((strict_score, [0, 1, 0, 0]), (flexible_score, [0, 1, 1, 0])):
            assert rewards_of_call(function, replace(row, prompt=prompt), texts) == expected


def test_gsm8k_rows_have_question_instruction_and_number(write):
    """The reference's number is parsed once, at load; both scores are logged. Pitfall 56."""
    path = write([json.dumps({"question": "How many?", "answer": "2*600=<<2*600=1200>>1200\n#### 1,200"})])
    task = load_gsm8k(path, [])
    assert task.train_rows == [Row("How many?" + INSTRUCTION, {"answer": 1200.0}, f"{path}:1")]
    assert (task.rewards, task.extra_scores) == ({"strict": strict_score}, {"flexible": flexible_score})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"answer": "#### 3"}', "field 'question' is None"),
        ('{"question": "q", "answer": 3}', "field 'answer' is 3"),
        ('{"question": "q", "answer": "three"}', "field 'answer' has no number after '####'"),
    ],
)
def test_a_bad_gsm8k_row_is_refused_with_file_line_and_field(write, line, said):
    """Also a reference answer that could never be matched."""
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: {said}"):
        read_gsm8k(write(['{"question": "q", "answer": "#### 3"}', line]))


def test_the_real_gsm8k_files_load_and_their_answers_are_right(data_folder):
    """7473 and 1319 rows; each reference solution scores 1, strictly and flexibly, and another row's does not."""
    for name, count in (("train", 7473), ("test", 1319)):
        path = data_folder / "gsm8k" / f"{name}.jsonl"
        rows = read_gsm8k(str(path))
        assert len(rows) == count
        solutions = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
        answers = [row.columns["answer"] for row in rows]
        assert strict_score(solutions, answers) == flexible_score(solutions, answers) == [1.0] * count
        assert sum(strict_score(solutions[1:] + solutions[:1], answers)) < 0.1 * count


def test_sorting_holds_out_what_it_does_not_train_on_and_scores_the_sorted_string_alone():
    """Distinct strings of 4 to 8 digits, none in both parts, the same each time. Pitfall 57."""
    task = load_sorting(num_train=2000, num_eval=100)
    prompts = [row.prompt for row in (*task.train_rows, *eval_rows(task))]
    assert (len(task.train_rows), len(eval_rows(task)), len(set(prompts))) == (2000, 100, 2100)
    assert {len(prompt) - 1 for prompt in prompts} == {4, 5, 6, 7, 8}
    assert set("".join(prompts)) == set(ALPHABET)
    assert load_sorting(num_train=2000, num_eval=100) == task
    answers = [row.columns["answer"] for row in task.train_rows]
    assert answers == ["".join(sorted(row.prompt[:-1])) for row in task.train_rows]
    assert score(answers, answers) == [1.0] * 2000
    assert max(map(len, answers)) < task.max_new_tokens
    wrong = ["", "1123 ", " 1123", "1123=", "123", "11233", "3211", "1123\n"]
    assert score(wrong, ["1123"] * len(wrong)) == [0.0] * len(wrong)


@pytest.fixture
def mine(tmp_path):
    """The spec of a reward of one's own by its name; each returns another number."""
    function = "def {}(completions):\n    return [{}.0 for _ in completions]\n"
    names = {"three": 3, "four": 4, "strict": 5}
    (tmp_path / "mine.py").write_text("".join(function.format(*item) for item in names.items()))
    return lambda name: f"{tmp_path}/mine.py:{name}"


def returned(functions):
    """Each function's reward of one completion, in order."""
    rows = Row("hello", {"answer": 3}, "f:1")
    return [(name, rewards_of_call(function, rows, ["a"])) for name, function in functions.items()]


def test_each_of_several_reward_models_has_a_name_that_no_function_may_have(write, mine):
    config = RunConfig(data=write([GOOD]), reward_model=("a", "b"), reward=(mine("three"),))
    assert config.reward_models == {"reward_model": "a", "reward_model_2": "b"}
    load_task(config)
    with pytest.raises(InputError, match="the name reward_model_2 is taken"):
        load_task(replace(config, reward=("mine.py:reward_model_2",)))


def test_a_reward_or_reward_model_takes_the_place_of_the_tasks_own_which_is_still_logged(write, mine):
    """A run trains on the user's functions, in order; the caller adds a reward model, which is enough for --data."""
    assert load_task(RunConfig()).name == "sorting"
    path = write([json.dumps({"question": "q", "prompt": "q", "answer": "#### 3"})])
    gsm8k = {"strict": strict_score, "flexible": flexible_score}
    three = {"reward": (mine("four"), mine("three"))}
    both = [("four", [4.0]), ("three", [3.0])]
    for flags, logged in (
        ({"task": "gsm8k", "data": path, **three}, gsm8k),
        ({"task": "sorting", **three}, {"exact": score}),
        ({"data": path, "reward_model": ("dir",)}, {}),
        ({"reward_model": ("dir",)}, {"exact": score}),
    ):
        task = load_task(RunConfig(**flags))
        assert returned(task.rewards) == (both if "reward" in flags else [])
        assert dict(task.extra_scores) == logged


def test_two_rewards_of_one_name_are_refused(write, mine, tmp_path):
    """Metrics and weights go by name: one would take the other's place, or that of the task's logged score."""
    (tmp_path / "other.py").write_text("def three(completions):\n    return [0.0 for _ in completions]\n")
    for other in (mine("three"), f"{tmp_path}/other.py:three"):
        with pytest.raises(ValueError, match=r"--reward .*mine\.py:three .*: two functions of one name"):
            load_task(RunConfig(reward=(mine("three"), other)))
    path = write([json.dumps({"question": "q", "answer": "#### 3"})])
    with pytest.raises(ValueError, match=r"--reward .*strict"):
        load_task(RunConfig(task="gsm8k", data=path, reward=(mine("strict"),)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"task": "gsm8k"}, "--task gsm8k needs --data"),
        (
            {"data": "a.jsonl"},
            "needs --reward FILE.py:FUNCTION, or --reward episode .*, --reward-model DIR or --task gsm8k",
        ),
        ({"task": "sorting", "data": "a.jsonl"}, "leave out --data"),
        ({"eval_data": ("a.jsonl",)}, "leave out --data and --eval-data"),
        ({"data": "a.jsonl", "reward": ("score",)}, "--reward score: expected"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_by_name(arguments, said):
    """The error names the flag to add, to leave out or to correct."""
    with pytest.raises(ValueError, match=said):
        load_task(RunConfig(**arguments))


def test_several_held_out_files_are_kept_apart(write, tmp_path):
    """By their paths; two of one name would give one metric, and are refused."""
    first = write([GOOD] * 2, "easy.jsonl")
    second = write([GOOD] * 3, "hard.jsonl")
    config = RunConfig(task="jsonl", data=first, eval_data=(first, second), reward_model=("dir",))
    task = load_task(config)
    assert (task.name, len(task.train_rows), task.rewards) == ("easy", 2, {})
    assert {path: len(rows) for path, rows in task.eval_sets.items()} == {first: 2, second: 3}
    (tmp_path / "other").mkdir()
    again = write([GOOD], "other/easy.jsonl")
    with pytest.raises(InputError, match=r"--eval-data .* two files of one name"):
        load_task(replace(config, eval_data=(first, again)))
