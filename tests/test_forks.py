"""Forks of train_grpo.py: the most common changes take at most ten lines."""

import re
import textwrap

import pytest

from support.marks import slow
from support.models import moved_weights
from support.resuming import resume
from support.scripts import ROOT, changed_fork, read_metrics, read_rollouts, run_in_pool, trained

FLAGS = "--num-steps 3 --save-every 1 --keep-checkpoints 0 --eval-every 2 --prompts-per-step 4 --group-size 4"
FLAGS += " --num-minibatches 1 --lr 1e-3"
TWO_TURNS = {
    "    await episode.generate()\n": """\
    turn = await episode.generate(max_tokens=3)
    await episode.generate(after="=" if "1" in turn.text else "==")
""",
}
BEFORE_SCORING = '        metrics.begin("score")\n'
LENGTH_PENALTY = {
    BEFORE_SCORING: BEFORE_SCORING
    + """\
        lengths = groups.num_loss_tokens[..., None]
        groups = dataclasses.replace(groups, rewards=groups.rewards - 0.01 * lengths)
""",
    "from dataclasses import dataclass\n": "import dataclasses\nfrom dataclasses import dataclass\n",
}


@pytest.mark.parametrize("more", ["", slow("--max-staleness 2")], ids=["whole", "partial"])
def test_a_rollout_with_appended_text_between_two_turns_and_a_length_penalty(
    two_ranks, one_rank, runs, tmp_path, more
):
    """The gap is 0, only sampled tokens are penalised, a resume gives equal bits, and one rank gives equal rollouts."""
    name = "partial" if more else "whole"
    fork = changed_fork(tmp_path, name, TWO_TURNS, LENGTH_PENALTY)
    folder = trained(two_ranks, runs / name, fork, FLAGS, more)
    metrics = read_metrics(folder)
    gaps = [line["policy/logp_gap_max"] for line in metrics if "policy/logp_gap_max" in line]
    assert gaps, "the current weights sampled no token"
    assert set(gaps) == {0.0}
    for line in metrics:
        rollouts = read_rollouts(folder, line["step"])
        assert line["count/tokens"] == sum(rollout["num_tokens"] for rollout in rollouts)
        expected = sum(r["reward"] - 0.01 * r["num_tokens"] for r in rollouts) / len(rollouts)
        assert line["reward/mean"] == pytest.approx(expected)
        assert all("=" in rollout["completion"] for rollout in rollouts)
    if not more:
        resume(two_ranks, fork, folder, FLAGS, last_step=2)
    one = trained(one_rank, runs / f"{name}-one", fork, FLAGS, more, "--num-steps 1")
    first = [[r["completion"] for r in read_rollouts(run, 1)] for run in (folder, one)]
    assert first[0] == first[1]


HINGE = {
    "    if config.entropy_coef:\n": "    loss = loss + 0.1 * (0.5 - entropy).relu()\n    if config.entropy_coef:\n",
}
SKIP_NONE = {
    "        is_skipped = skippable_rollouts(config, groups, weights)": "        is_skipped = None",
}
IMITATION_FROM_STEP_2 = {
    "                objective = (micro.loss_weights * loss).sum()\n": """\
                if step >= 2:
                    loss = loss - 0.1 * new
                objective = (micro.loss_weights * loss).sum()
""",
}


@pytest.mark.parametrize(
    ("name", "term", "num_steps"), [("hinge", HINGE, 0), slow("imitation", IMITATION_FROM_STEP_2, 1)]
)
def test_a_term_that_skipped_rollouts_would_miss_is_refused_when_it_begins(
    one_rank, runs, tmp_path, name, term, num_steps
):
    """Both terms have a gradient on rollouts with equal rewards too. A fork without skips trains on each term."""
    flags = f"{FLAGS} --temperature 0.5"
    fork = changed_fork(tmp_path, name, term)
    with pytest.raises(AssertionError, match="skippable_rollouts: skips rollouts"):
        run_in_pool(one_rank, fork, f"{flags} --run-name {name}", runs=runs)
    assert len(read_metrics(runs / name)) == num_steps
    fork = changed_fork(tmp_path, f"{name}_on_all", term, SKIP_NONE)
    lines = read_metrics(trained(one_rank, runs / f"{name}_on_all", fork, flags))
    assert not any("perf/skipped_tokens" in line for line in lines)


COLLECT = "        groups = collector.collect("
COOLING = {COLLECT: f"        collector.temperature = 1.5 / step\n{COLLECT}"}


@pytest.mark.parametrize("more", ["", slow("--max-staleness 2")], ids=["whole", "partial"])
def test_a_temperature_by_step_is_that_of_sampling_and_of_scoring(two_ranks, one_rank, runs, tmp_path, more):
    """The gap is 0 in each step, and after a resume, although rollouts in flight keep their initial temperature."""
    name = f"cooling{len(more)}"
    fork = changed_fork(tmp_path, name, COOLING)
    folder = trained(two_ranks, runs / name, fork, FLAGS, more)
    lines = read_metrics(folder)
    assert {line["policy/logp_gap_max"] for line in lines if "policy/logp_gap_max" in line} == {0.0}
    hot = trained(
        one_rank, runs / f"{name}-hot", "train_grpo.py", FLAGS, more, "--num-steps 1 --temperature 1.5"
    )
    first, as_hot = ([r["completion"] for r in read_rollouts(run, 1)] for run in (folder, hot))
    assert first == as_hot
    resume(two_ranks, fork, folder, FLAGS, more, last_step=2)


LOAD = """\
    policy = setup.load_model(setup.model_config, setup.model_folder)
    optimizer = policy.make_optimizer()
"""
OPTIMIZERS = re.findall(
    r"```python\n(policy = .*?)```", (ROOT / "docs" / "bring_your_own.md").read_text(), re.DOTALL
)


@pytest.mark.parametrize(
    ("name", "lines", "is_trained"),
    [
        ("frozen", OPTIMIZERS[0], lambda name: "embed_tokens" not in name),
        ("muon", OPTIMIZERS[1], lambda name: "proj" in name),
    ],
)
def test_a_fork_brings_its_optimizer_and_groups_keep_their_learning_rates(
    two_ranks, runs, tmp_path, name, lines, is_trained
):
    """The docs' lines train exactly the chosen weights, and a resume gives equal bits."""
    fork = changed_fork(tmp_path, f"by_{name}", {LOAD: textwrap.indent(lines, "    ")})
    folder = trained(two_ranks, runs / f"by_{name}", fork, FLAGS, "--num-steps 2")
    resume(two_ranks, fork, folder, FLAGS, "--num-steps 2")
    (model,) = runs.glob("toy-*")
    moved = moved_weights(model, folder / "checkpoints/000002")
    assert moved == {name: is_trained(name) for name in moved}
