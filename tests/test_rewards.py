"""Reward functions in TRL's shape: what they are given, where they come from, what they may return."""

import functools
import math

import numpy
import pytest
import torch

from minirl.rewards import compute_rewards, load_reward
from minirl.tasks import Row

ROWS = [
    Row("one?", {"answer": 1, "level": "easy"}, "f.jsonl:1"),
    Row([{"role": "user", "content": "two?"}], {"answer": 2}, "f.jsonl:2"),
]


def rewards_of(function, rows=ROWS, completions=("1", "2")):
    return compute_rewards(function, rows, completions=completions, completion_ids=[[7]] * len(completions))


def returning(value):
    def made_up(completions):
        return value

    return made_up


def test_a_function_with_kwargs_gets_prompts_completions_ids_and_every_column():
    """TRL's shape: lists by keyword; a column that a row does not have is None there; chat in, chat out."""
    seen = {}

    def everything(prompts, completions, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [0.0, 1.0]

    assert rewards_of(everything) == [0.0, 1.0]
    assert seen == {
        "prompts": ["one?", [{"role": "user", "content": "two?"}]],
        "completions": ["1", [{"role": "assistant", "content": "2"}]],
        "completion_ids": [[7], [7]],
        "answer": [1, 2],
        "level": ["easy", None],
    }


def test_a_function_gets_only_the_columns_that_it_names():
    """A reward of one argument, and one that names a column, are called with just that."""
    assert rewards_of(lambda completions: [len(completions), 0]) == [2.0, 0.0]
    assert rewards_of(lambda answer: answer) == [1.0, 2.0]
    assert rewards_of(lambda completions, *, level="unused": [level == ["easy", None]] * 2) == [1.0, 1.0]
    assert rewards_of(functools.partial(lambda scale, answer: [scale * a for a in answer], 10)) == [10.0, 20.0]


def test_a_data_column_cannot_take_the_place_of_the_completions():
    """Columns named like the arguments of the interface are not passed over them."""
    rows = [Row("p", {"completions": "from the file", "prompts": "too", "completion_ids": "too"}, "f:1")]
    seen = []

    def keep(prompts, completions, completion_ids):
        seen.extend([prompts, completions, completion_ids])
        return [1]

    rewards_of(keep, rows, ["sampled"])
    assert seen == [["p"], ["sampled"], [[7]]]


def test_no_completions_need_no_call():
    """A rank without rollouts does not call the function on empty lists."""

    def never():
        raise AssertionError

    assert compute_rewards(never, [], completions=[], completion_ids=[]) == []


def test_an_error_in_the_function_is_not_swallowed():
    """The user's own traceback is what they need."""

    def broken(completions):
        return [1 / 0 for _ in completions]

    with pytest.raises(ZeroDivisionError):
        rewards_of(broken)


@pytest.mark.parametrize(
    "value",
    [
        [True, False],
        (1, 0),
        numpy.array([1.0, 0.0], dtype=numpy.float32),
        [numpy.bool_(True), numpy.int64(0)],
        torch.tensor([1.0, 0.0]),
        [torch.tensor(1.0), torch.tensor(False)],
    ],
    ids=["bool", "tuple_of_int", "numpy_array", "numpy_scalars", "tensor", "tensors"],
)
def test_numbers_of_every_kind_become_floats(value):
    """bool, int, numpy and 0-d tensors are numbers."""
    rewards = rewards_of(returning(value))
    assert rewards == [1.0, 0.0]
    assert all(type(reward) is float for reward in rewards)


@pytest.mark.parametrize(
    "bad",
    [None, math.nan, math.inf, -math.inf, "1.0", "", [1.0], {}, 1j, numpy.nan, torch.tensor(math.inf), 10**400],
    ids=lambda value: str(value)[:20],
)
def test_what_is_not_a_finite_number_is_refused_by_name(bad):
    """Function, value, row and completion are in the error, which comes before any of it can reach a gradient."""
    with pytest.raises(ValueError, match=r"made_up returned .*f\.jsonl:2.*'2'.*finite number") as error:
        rewards_of(returning([1.0, bad]))
    assert repr(bad)[:20] in str(error.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.0], "1 values for 2"),
        ([1.0] * 3, "3 values for 2"),
        ([], "0 values for 2"),
        (1.0, "1.0; expected a list of 2"),
        (None, "None; expected a list of 2"),
        (torch.tensor(1.0), "expected a list of 2"),
        (numpy.array(1.0), "expected a list of 2"),
    ],
    ids=["short", "long", "empty", "scalar", "none", "zero_dim_tensor", "zero_dim_array"],
)
def test_another_number_of_values_is_refused_by_name(value, said):
    """One value per completion, in a list: anything else names the function and both counts."""
    with pytest.raises(ValueError, match=f"made_up returned .*{said}"):
        rewards_of(returning(value))


def test_a_long_completion_is_shortened_in_the_error():
    """The error stays readable when the completion has thousands of characters."""
    with pytest.raises(ValueError, match="made_up") as error:
        rewards_of(returning([None]), ROWS[:1], ["x" * 10_000])
    assert len(str(error.value)) < 400


def test_load_reward_returns_the_named_function(tmp_path):
    """The module is run once as a file, whatever else it holds; colons in the folder's name do no harm."""
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "mine.py").write_text("BONUS = 2\ndef score(completions):\n    return [BONUS for _ in completions]\n")
    assert rewards_of(load_reward(f"{folder}/mine.py:score")) == [2.0, 2.0]


@pytest.mark.parametrize("spec", ["mine.py", "mine.py:", "mine:score", ":score", "", "mine.txt:score"])
def test_load_reward_refuses_what_is_not_file_and_function(spec):
    """The error repeats the flag, the value and the shape it should have."""
    with pytest.raises(ValueError, match=r"--reward .*expected file\.py:function") as error:
        load_reward(spec)
    assert f"--reward {spec}:" in str(error.value)


def test_load_reward_refuses_a_missing_file_and_a_missing_function(tmp_path):
    """Which file is missing, or which name the file lacks."""
    path = tmp_path / "mine.py"
    with pytest.raises(FileNotFoundError, match=r"--reward .*mine\.py:score: there is no file .*mine\.py"):
        load_reward(f"{path}:score")
    path.write_text("number = 3\n")
    for name in ("score", "number"):
        with pytest.raises(ValueError, match=rf"mine\.py has no function {name}"):
            load_reward(f"{path}:{name}")


def test_load_reward_shows_the_error_of_the_file(tmp_path):
    """A file that does not run says so itself, before anything expensive starts."""
    (tmp_path / "mine.py").write_text("import no_such_module_of_mine\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_mine"):
        load_reward(f"{tmp_path}/mine.py:score")
