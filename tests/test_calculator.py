"""The example of a tool: it learns, and its task is fair."""

import re

import pytest

from minirl.data.calculator import calls, load_calculator, score
from support.scripts import ROOT, read_metrics, read_rollouts, trained

EXAMPLE = ROOT / "docs" / "examples" / "calculator.py"


@pytest.mark.slow
def test_the_command_of_the_page_learns_to_call(two_ranks, tmp_path):
    """Calls are rare at first and nearly all at the end, each is answered, and answers become right."""
    flags = f"--task calculator --rollout {EXAMPLE}:calculator --num-steps 12"
    folder = trained(two_ranks, tmp_path / "learns", "train_grpo.py", flags)
    metrics = read_metrics(folder)
    assert metrics[0]["reward/calls"] < 0.15
    assert metrics[0]["reward/exact"] < 0.1
    assert metrics[-1]["reward/calls"] > 0.9
    assert metrics[-1]["reward/exact"] > 0.5
    assert {line["policy/logp_gap_max"] for line in metrics} == {0.0}
    num_answered = 0
    for rollout in read_rollouts(folder, 12):
        call, _, rest = rollout["completion"].partition("</calc>")
        factors = re.search(r"<calc>(\d+)\*(\d+)$", call)
        if factors is None:
            assert rest == ""  # a malformed call ends the rollout
        elif rest:
            assert rest.startswith(f"{int(factors[1]) * int(factors[2])}=")
            num_answered += 1
    assert num_answered > 0


def test_the_task_holds_out_pairs_and_its_calls_are_rare_examples():
    """Pitfall 57: no held-out pair is trained on, nor an example of the warm start."""
    task = load_calculator(num_train=2000, num_eval=100)
    held_out = {row.prompt for row in task.eval_sets["calculator"]}
    prompts = {row.prompt for row in task.train_rows}
    assert (len(prompts), len(held_out)) == (2000, 100)
    assert held_out.isdisjoint(prompts)
    first_turns = [row.columns["answer"] for row in task.warm_start_rows if row.prompt in prompts]
    assert 60 < sum(calls(first_turns)) < 140
    assert not any(row.prompt.startswith(tuple(held_out)) for row in task.warm_start_rows)


def test_only_the_answer_behind_the_last_result_is_rewarded():
    """Neither a call nor its result is one: using the tool earns nothing."""
    right = ["408", "<calc>12*34</calc>408=408", "<calc>1*3</calc>3=<calc>12*34</calc>408=408"]
    call = "<calc>12*34</calc>"
    wrong = ["", call, f"{call}408=", f"{call}408=40", "4080", f"{call}408=408="]
    assert score(right, ["408"] * len(right)) == [1.0] * len(right)
    assert score(wrong, ["408"] * len(wrong)) == [0.0] * len(wrong)
    assert calls([*right, *wrong]) == [0, 1, 1, 0, 1, 1, 1, 0, 1]
