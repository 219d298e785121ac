"""Forks of train_grpo.py of at most ten changed lines: the commonest wishes are small changes of the script."""

import re

import pytest

from minirl.run.embedded_model import TOKEN_PATTERN
from support.marks import slow
from support.scripts import changed_fork, read_metrics, read_rollouts, run_in_pool, untimed

FLAGS = "--num-steps 3 --save-every 1 --keep-checkpoints 0 --eval-every 2 --prompts-per-step 4 --group-size 4"
FLAGS += " --eval-rows 1 --num-minibatches 1 --lr 1e-3"
TWO_TURNS = {
    "    yield episode.generate()\n": """\
    turn = yield episode.generate(max_tokens=3)
    yield episode.generate(after="=" if "1" in turn.text else "==")
""",
}
AFTER_COLLECT = (
    '        add_generation(metrics, collector.take_count("sampled_tokens"), engine.take_stats())\n'
)
LENGTH_PENALTY = {
    AFTER_COLLECT: AFTER_COLLECT
    + """\
        lengths = groups.table.num_loss_tokens.view(len(groups.rewards), -1, 1)
        groups = dataclasses.replace(groups, rewards=groups.rewards - 0.01 * lengths)
""",
    "import itertools\n": "import dataclasses\nimport itertools\n",
}


@pytest.mark.parametrize(
    "more",
    ["", slow("--max-staleness 2")],
    ids=["whole", "partial"],
)
def test_a_rollout_with_appended_text_between_two_turns(two_ranks, one_rank, runs, tmp_path, more):
    """The gap is 0, only sampled tokens count, a resume gives the same bits, and one rank the same rollouts."""
    name = "partial" if more else "whole"
    fork = changed_fork(tmp_path, name, TWO_TURNS)

    def train(pool, run_name, *flags):
        run_in_pool(pool, fork, FLAGS, more, *flags, f"--run-name {run_name}", runs=runs)
        return [untimed(line) for line in read_metrics(runs / run_name)]

    metrics = train(two_ranks, name)
    gaps = [line["policy/logp_gap_max"] for line in metrics if "policy/logp_gap_max" in line]
    assert gaps, "of tokens that the present weights sampled"
    assert set(gaps) == {0.0}
    for line in metrics:
        rollouts = read_rollouts(runs / name, line["step"])
        assert line["count/tokens"] == sum(rollout["num_tokens"] for rollout in rollouts)
        assert all("=" in rollout["completion"] for rollout in rollouts)
        for rollout in rollouts:
            num_tokens = len(re.findall(f"<unk>|{TOKEN_PATTERN}", rollout["completion"]))
            # One or two are appended, and "<eos>" is not written after one turn or both.
            assert num_tokens - 2 <= rollout["num_tokens"] <= num_tokens + 1
    if not more:
        return
    # In flight are episodes between their turns and within them.
    train(two_ranks, f"{name}-resumed", "--num-steps", "2")
    assert train(two_ranks, f"{name}-resumed", "--resume", "force") == metrics
    train(one_rank, f"{name}-one", "--num-steps", "1")
    first = [read_rollouts(runs / run_name, 1) for run_name in (name, f"{name}-one")]
    assert [r["completion"] for r in first[0]] == [r["completion"] for r in first[1]]


def test_a_length_penalty_on_sampled_tokens(one_rank, runs, tmp_path):
    """Two turns: appended tokens are not penalised."""
    fork = changed_fork(tmp_path, "penalty", TWO_TURNS, LENGTH_PENALTY)
    run_in_pool(one_rank, fork, FLAGS, "--run-name penalty", runs=runs)
    for line in read_metrics(runs / "penalty"):
        rollouts = read_rollouts(runs / "penalty", line["step"])
        expected = sum(r["reward"] - 0.01 * r["num_tokens"] for r in rollouts) / len(rollouts)
        assert line["reward/mean"] == pytest.approx(expected)


HINGE = {
    "    if config.entropy_coef:\n": "    loss = loss + 0.1 * (0.5 - entropy).relu()\n    if config.entropy_coef:\n",
}
TRAIN_ALL = {
    "    if config.whiten or config.kl_reward_coef:": "    if True:",
}


def test_a_term_that_is_trained_does_not_know_of_is_refused_and_then_learned(one_rank, runs, tmp_path):
    """A hinge on the entropy has a gradient on rollouts of equal rewards too."""
    flags = f"{FLAGS} --temperature 0.5"
    fork = changed_fork(tmp_path, "hinge", HINGE)
    with pytest.raises(AssertionError, match="is_trained: leaves out rollouts"):
        run_in_pool(one_rank, fork, f"{flags} --run-name hinge", runs=runs)
    fork = changed_fork(tmp_path, "hinge_on_all", HINGE, TRAIN_ALL)
    run_in_pool(one_rank, fork, f"{flags} --run-name hinge_on_all", runs=runs)
    assert {line["perf/skipped_tokens"] for line in read_metrics(runs / "hinge_on_all")} == {0.0}


RATIO = {
    "    ratio = importance_ratio(\n"
    "        new, old, level=config.ratio_level, lengths=micro.lengths, loss_mask=micro.loss_mask\n"
    "    )\n": "    ratio = torch.exp(new - micro.old_logprobs)\n",
}


def test_the_old_logprobs_of_a_microbatch_are_there_with_one_update_a_step(one_rank, runs, tmp_path):
    """So the natural ratio trains as the script's does."""
    fork = changed_fork(tmp_path, "ratio", RATIO)
    for name, script in (("ratio", fork), ("original", "train_grpo.py")):
        run_in_pool(one_rank, script, FLAGS, f"--run-name {name}", runs=runs)
    lines = [[untimed(line) for line in read_metrics(runs / name)] for name in ("ratio", "original")]
    assert lines[0] == lines[1]
