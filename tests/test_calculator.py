"""The example of a tool: exact over turns, the same anywhere and after a kill, and it learns."""

import contextlib
import dataclasses
import io
import shutil
from pathlib import Path
from unittest import mock

import pytest

from minirl.data.calculator import calls, load_calculator, score
from minirl.extras import show
from minirl.run import embedded_model
from support.resuming import digests, resume
from support.scripts import ROOT, changed_fork, evaluated, read_metrics, read_rollouts, reward_of, trained

EXAMPLE = ROOT / "docs" / "examples" / "calculator.py"
TOOL = f"--rollout {EXAMPLE}:calculator"
SMALL = "--task calculator --num-steps 3 --prompts-per-step 3 --group-size 4 --save-every 1"
SMALL += " --keep-checkpoints 0"


def make_model_that_calls(rank: int, runs: str) -> str:
    """Make the embedded model in a few seconds: it calls often and has hardly learned what to write."""
    warm_start = embedded_model.warm_start

    def short(task):
        with_calls = [
            row for row in task.warm_start_rows if calls([row.prompt + row.columns["answer"]]) == [1.0]
        ]
        with mock.patch.dict(embedded_model.RECIPE, warm_start_steps={"calculator": 30}):
            return warm_start(dataclasses.replace(task, warm_start_rows=with_calls))

    with mock.patch.object(embedded_model, "warm_start", short), contextlib.redirect_stdout(io.StringIO()):
        return str(embedded_model.embedded_model_folder(Path(runs), "calculator"))


@pytest.fixture(scope="module")
def calling(one_rank, tmp_path_factory) -> Path:
    """A folder of runs whose model calls."""
    folder = tmp_path_factory.mktemp("calling")
    one_rank.run(make_model_that_calls, str(folder))
    return folder


def train(pool, folder: Path, *flags: str, script: str = "train_grpo.py") -> Path:
    """Train on all ranks of a pool; the folder of the run."""
    return trained(pool, folder, script, SMALL, reward(folder), *flags)


def reward(folder: Path) -> str:
    """Unlike answers' being right, it differs in every group: there is something to learn in every step."""
    return reward_of(folder.parent, "float(len(c) % 5)")


def without_advantages(folder: Path) -> list[dict]:
    """The rollouts of the first step."""
    return [line | {"advantage": None} for line in read_rollouts(folder, 1)]


@pytest.mark.slow
def test_an_evaluation_calls_the_calculator(one_rank, two_ranks, calling):
    """As training does, on any number of ranks: its results are appended, and the rollouts show them."""
    flags = f"--task calculator {TOOL} --samples 16 --eval-rows 6 --run-name"
    result = evaluated(one_rank, f"{flags} evaluated", runs=calling)
    rollouts = read_rollouts(calling / "evaluated", 0)
    assert len(show.texts_of(show.step_file(str(calling / "evaluated"), None))) == len(rollouts)
    called = [any(segment["kind"] == "environment" for segment in r.get("segments", [])) for r in rollouts]
    assert result["scores"]["eval/calls"]["mean"] >= sum(called) / len(called) > 0
    assert evaluated(two_ranks, f"{flags} evaluated-2", runs=calling) == result


@pytest.fixture(scope="module")
def on_two_ranks(two_ranks, calling) -> Path:
    """The folder of a run with the example's function in worker processes."""
    return train(two_ranks, calling / "two", TOOL)


@pytest.mark.slow
def test_calls_are_answered_and_every_turn_is_trained_on_as_it_was_sampled(on_two_ranks):
    """Completions of one turn and of more; the gap is 0 in every step; appended tokens are not in the loss."""
    rollouts = [line for step in (1, 2, 3) for line in read_rollouts(on_two_ranks, step)]
    answered = [line for line in rollouts if "</calc>" in line["completion"][:-7]]
    assert 0 < len(answered) < len(rollouts)
    for line in answered:
        call, _, rest = line["completion"].partition("</calc>")
        first, second = call.rpartition("<calc>")[2].split("*")
        assert rest.startswith(f"{int(first) * int(second)}=")
    metrics = read_metrics(on_two_ranks)
    assert [line["policy/logp_gap_max"] for line in metrics] == [0.0] * 3
    assert all(line["optim/grad_norm"] > 0 for line in metrics)
    for line in metrics:
        assert line["count/tokens"] == sum(
            rollout["num_tokens"] for rollout in read_rollouts(on_two_ranks, line["step"])
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "more"),
    [
        ("one_rank", ""),
        ("two_ranks", "--cache-tokens 128"),
        ("one_rank", "--cache-tokens 512"),
    ],
    ids=["one rank", "few places", "tight cache"],
)
def test_rollouts_depend_neither_on_ranks_nor_on_batch_and_cache(request, calling, on_two_ranks, pool, more):
    folder = calling / f"{pool}{len(more)}"
    train(request.getfixturevalue(pool), folder, TOOL, "--num-steps 1", more)
    assert without_advantages(folder) == without_advantages(on_two_ranks)


@pytest.mark.slow
def test_the_function_in_a_script_gives_the_run_of_the_flag(two_ranks, calling, on_two_ranks, tmp_path):
    shutil.copy(EXAMPLE, tmp_path / "calculator.py")
    named = {"        rollout,\n": "        calculator,\n"}
    imported = {
        "from dataclasses import dataclass\n": "from dataclasses import dataclass\nfrom calculator import calculator\n"
    }
    script = changed_fork(tmp_path, "calculator_fork", named, imported)
    fork = train(two_ranks, calling / "fork", script=script)
    assert digests(fork, has_workers=True) == digests(on_two_ranks, has_workers=True)


@pytest.mark.slow
@pytest.mark.parametrize("last_step", [0, 2])
def test_row_12_a_run_with_a_tool_that_was_killed_is_the_uninterrupted_run(
    two_ranks, calling, on_two_ranks, last_step
):
    flags = (SMALL, reward(on_two_ranks), TOOL)
    resume(two_ranks, "train_grpo.py", on_two_ranks, *flags, last_step=last_step, has_workers=True)


@pytest.mark.slow
def test_the_command_of_the_page_learns_to_call(two_ranks, tmp_path):
    """The first of its steps: calls are rare at first and nearly all at the end, and answers become right."""
    flags = f"--task calculator {TOOL} --num-steps 12"
    metrics = read_metrics(trained(two_ranks, tmp_path / "learns", "train_grpo.py", flags))
    assert metrics[0]["reward/calls"] < 0.15
    assert metrics[0]["reward/exact"] < 0.1
    assert metrics[-1]["reward/calls"] > 0.9
    assert metrics[-1]["reward/exact"] > 0.5
    assert {line["policy/logp_gap_max"] for line in metrics} == {0.0}


def test_the_task_holds_out_pairs_and_its_calls_are_rare_examples():
    """Pitfall 57: no held-out pair is trained on, nor an example of the warm start."""
    task = load_calculator(num_train=2000, num_eval=100)
    held_out = {row.prompt for row in task.eval_sets["calculator"]}
    prompts = {row.prompt for row in task.train_rows}
    assert (len(prompts), len(held_out)) == (2000, 100)
    assert held_out.isdisjoint(prompts)
    assert load_calculator(num_train=2000, num_eval=100) == task
    first_turns = [row.columns["answer"] for row in task.warm_start_rows if row.prompt in prompts]
    assert len(first_turns) == 2000
    assert 60 < sum(calls(first_turns)) < 140
    assert not any(row.prompt.startswith(tuple(held_out)) for row in task.warm_start_rows)


def test_the_page_leads_to_the_function_of_the_example_which_is_short():
    """In fewer than 15 lines."""
    assert "](examples/calculator.py)" in (ROOT / "docs" / "environments.md").read_text()
    _, _, function = EXAMPLE.read_text().partition("def calculator")
    assert function.count("\n") < 15


def test_only_the_answer_behind_the_last_result_is_rewarded():
    """Neither a call nor its result is one: using the tool earns nothing."""
    right = ["408", "<calc>12*34</calc>408=408", "<calc>1*3</calc>3=<calc>12*34</calc>408=408"]
    call = "<calc>12*34</calc>"
    wrong = ["", call, f"{call}408=", f"{call}408=40", "4080", f"{call}408=408="]
    assert score(right, ["408"] * len(right)) == [1.0] * len(right)
    assert score(wrong, ["408"] * len(wrong)) == [0.0] * len(wrong)
    assert calls([*right, *wrong]) == [0, 1, 1, 0, 1, 1, 1, 0, 1]
