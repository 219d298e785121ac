"""Tasks: rows are read or rejected by line and field, answers are extracted, and held-out rows stay held out."""

import json
from pathlib import Path

import pytest

from minirl.data import calculator
from minirl.data.calculator import load_calculator
from minirl.data.gsm8k import (
    INSTRUCTION,
    flexible_answer,
    flexible_score,
    load_gsm8k,
    strict_answer,
    strict_score,
)
from minirl.data.sorting import load_sorting, score
from minirl.data.task import Row, Task
from minirl.run.config import RunConfig
from minirl.run.embedded_model import CONFIG, save_tokenizer
from minirl.run.inputs import load_prompts, load_rewards, load_task
from support.rollouts import rewards_of_call
from support.scripts import ROOT, read_metrics, read_rows, trained, write_rows
from support.texts import user

CALCULATOR = ROOT / "docs" / "examples" / "calculator.py"


# Answers that both extractors read, that only the flexible extractor reads, and that neither extractor reads.
STRICT = {
    "#### 18.": 18,
    "#### 007": 7,
    "#### -7": -7,
    "#### $1,234.50": 1234.5,
    "she has 3 left #### 4": 4,
    "#### 5 or #### 7": 7,
    "#### 5\nNo, wait.": 5,
    "#### 40%": 40,
    "#### .5": 0.5,
    "#### 3/4": 0.75,
}
FLEXIBLE = {
    "a #### in the middle, then 5": 5,
    "$5 + $6 = $11": 11,
    "it costs 3,000, then 4,": 4,
    "it fell to -3 degrees": -3,
    "#### **72**": 72,
    "#### \\boxed{72}": 72,
    "#### \u22125": -5,
    "it is $-5.": -5,
    "1.5e3": 1500,
}
NO_ANSWER = (
    "#### five",
    "####",
    "no digits at all, $ , . - ####",
    "",
    "#### 2,3",
    "1,2,3,4",
    "pages 10-12",
    "#### 1e999",
    "-" * 100_000,
)


@pytest.mark.parametrize("text", [*STRICT, *FLEXIBLE, *NO_ANSWER])
def test_answers_are_extracted_by_the_table(text):
    """The strict answer is the number after the last ####, the flexible answer the last number. Pitfall 19.

    Commas separate thousands. Pitfalls 20 and 56.
    """
    assert strict_answer(text) == STRICT.get(text)
    assert flexible_answer(text) == (STRICT | FLEXIBLE).get(text)


@pytest.mark.parametrize("is_chat", [False, True])
def test_scores_are_of_the_completion_alone(is_chat):
    """This holds even if the prompt contains the answer in the right format, and for chats. Pitfall 19."""
    prompt = "Is it\n#### 5"
    row = Row([user(prompt)] if is_chat else prompt, {"answer": 5.0}, "f:1")
    texts = ["I do not know", "#### 5", "so 5", "#### 6"]
    assert rewards_of_call(strict_score, row, texts) == [0, 1, 0, 0]
    assert rewards_of_call(flexible_score, row, texts) == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": "#### 3"}, r"no text in a field 'question'; the fields are \['answer'\]"),
        ({"question": None, "answer": "#### 3"}, "no text in a field 'question'"),
        ({"question": "q", "answer": "three"}, "no number after '####' in a field 'answer'"),
    ],
)
def test_a_bad_gsm8k_row_is_refused_with_file_line_and_field(tmp_path, row, said):
    """This includes a reference answer that no completion could match."""
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: {said}"):
        load_gsm8k(write_rows(tmp_path / "rows.jsonl", [{"question": "q", "answer": "#### 3"}, row]), ())


def test_the_real_gsm8k_files_load_and_their_answers_are_right(data_folder):
    """Each reference solution scores 1 with both scores, and another row's solution does not. Pitfall 56."""
    train, test = (str(data_folder / "gsm8k" / f"{name}.jsonl") for name in ("train", "test"))
    task = load_gsm8k(train, [test])
    assert (task.rewards, task.extra_scores) == ({"strict": strict_score}, {"flexible": flexible_score})
    for path, rows, count in ((train, task.train_rows, 7473), (test, task.eval_sets[test], 1319)):
        examples = read_rows(Path(path))
        assert [row.prompt for row in rows] == [example["question"] + INSTRUCTION for example in examples]
        solutions = [example["answer"] for example in examples]
        answers = [row.columns["answer"] for row in rows]
        assert strict_score(solutions, answers) == flexible_score(solutions, answers) == [1.0] * count
        assert sum(strict_score(solutions[1:] + solutions[:1], answers)) < 0.1 * count


def test_a_run_evaluates_a_fixed_sample_of_a_long_file(tmp_path):
    """The sample spans the file, ignores the seed and is noted; short files are used in full. Pitfall 56."""
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def held_out(num_rows, seed):
        rows = [Row(f"{i}=", {"i": i}, f"f:{i}") for i in range(num_rows)]
        task = Task("numbers", rows[:1], {"f": rows}, {}, 4)
        prompts = load_prompts(RunConfig(seed=seed), task, tmp_path, tools=(), user_rollout=None)[2]
        return {prompts.row(i).columns["i"] for i in range(prompts.num_prompts)}, prompts.notes()

    sample, notes = held_out(1319, 0)
    assert len(sample) == 256
    assert 600 < sum(sample) / 256 < 720
    assert notes == ["eval: f: a fixed sample, 256 of 1,319 rows"]
    assert held_out(1319, 7) == (sample, notes)
    assert held_out(256, 0) == ({*range(256)}, [])


@pytest.mark.parametrize("load", [load_sorting, load_calculator])
def test_embedded_tasks_hold_out_what_they_do_not_train_on(load):
    """Prompts are distinct and reproducible; training and warm-start rows have no held-out prompt. Pitfall 57."""
    task = load(num_train=2000, num_eval=100)
    assert load(num_train=2000, num_eval=100) == task
    (held_out,) = task.eval_sets.values()
    assert len({row.prompt for row in (*task.train_rows, *held_out)}) == 2100
    asked = tuple(row.prompt for row in held_out)
    assert not any(row.prompt.startswith(asked) for row in task.warm_start_rows)
    answers = [row.columns["answer"] for row in task.train_rows]
    (exact,) = task.rewards.values()
    assert exact(answers, answers) == [1.0] * 2000


def test_the_sorted_string_alone_is_rewarded():
    wrong = ["", "1123 ", " 1123", "1123=", "123", "11233", "3211", "1123\n"]
    assert score(["1123", *wrong], ["1123"] * 9) == [1.0] + [0.0] * 8


def test_only_the_answer_behind_the_calculators_last_result_is_rewarded():
    """Neither a call nor its result is an answer: using the tool earns nothing."""
    call = "<calc>12*34</calc>"
    right = ["408", f"{call}408=408", f"<calc>1*3</calc>3={call}408=408"]
    wrong = ["", call, f"{call}408=", f"{call}408=40", "4080", f"{call}408=408="]
    assert calculator.score([*right, *wrong], ["408"] * 9) == [1.0] * 3 + [0.0] * 6
    assert calculator.has_call([*right, *wrong]) == [0, 1, 1, 0, 1, 1, 1, 0, 1]


@pytest.mark.slow
def test_a_run_learns_to_call_the_calculator(two_ranks, tmp_path):
    """Calls are rare at first and nearly universal at the end; answers become right, so calls get results."""
    flags = f"--task calculator --rollout {CALCULATOR}:calculator --num-steps 12"
    first, *_, last = read_metrics(trained(two_ranks, tmp_path / "learns", "train_grpo.py", flags))
    assert first["reward/calls"] < 0.15
    assert first["reward/exact"] < 0.1
    assert last["reward/calls"] > 0.9
    assert last["reward/exact"] > 0.5


def test_a_reward_or_reward_model_takes_the_place_of_the_tasks_own_which_is_still_logged(tmp_path):
    """A run trains on the user's functions, in order; the caller adds a reward model, which is enough for --data."""
    assert load_task(RunConfig()).name == "sorting"
    mine = tmp_path / "mine.py"
    mine.write_text("def three(completions): pass\ndef four(completions): pass")
    row = {"question": "q", "prompt": "q", "answer": "#### 3"}
    data = str(write_rows(tmp_path / "gsm8k.jsonl", [row]))
    assert load_task(RunConfig(data=data, reward_model=("dir",))).name == "jsonl"  # an evaluation's --task
    gsm8k = {"strict": strict_score, "flexible": flexible_score}
    for flags, rewards, logged in (
        (
            {"task": "gsm8k", "data": data, "reward": (f"{mine}:four", f"{mine}:three")},
            ["four", "three"],
            gsm8k,
        ),
        ({"data": data, "eval_data": (data,), "reward_model": ("dir",)}, [], {}),
        ({"reward_model": ("dir",)}, [], {"exact": score}),
    ):
        config = RunConfig(**flags)
        found = load_rewards(config, load_task(config))
        assert ([*found[0]], found[1]) == (rewards, logged)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"data": "a.jsonl"},
            "needs --reward FILE.py:FUNCTION, --reward episode .*, --reward-model DIR or --task gsm8k",
        ),
        ({"task": "sorting", "data": "a.jsonl"}, "drop --data"),
        ({"reward": ("score",)}, "--reward score: expected"),
        # Metrics and weights are identified by name.
        (
            {"data": "a.jsonl", "eval_data": ("a/x.jsonl", "b/x.jsonl")},
            "--eval-data .* two files have the same name",
        ),
        ({"reward": ("minirl.data.sorting:score", "mine.py:score")}, "mine.py:score: the name 'score'"),
        ({"reward": ("episode:",)}, "--reward episode:: the name '' belongs to another"),
        ({"reward": ("episode:mean",)}, "the name 'mean' belongs to another reward or metric"),
        ({"reward": ("minirl.data.calculator:calls",), "task": "calculator"}, "the name 'calls' belongs"),
        ({"reward": ("mine.py:reward_model_2",), "reward_model": ("a", "b")}, "the name 'reward_model_2'"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_by_name(arguments, said):
    """The error names the flag to add, to leave out or to correct."""
    config = RunConfig(**arguments)
    with pytest.raises(ValueError, match=said):
        load_rewards(config, load_task(config))
