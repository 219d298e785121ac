"""A resumed run is the uninterrupted one: tensors, optimizer state, samples, rollouts and numbers, bit for bit."""

import shutil
from pathlib import Path

import pytest

from support.marks import slow
from support.rank_pool import RankPool
from support.resuming import digests, interrupted_copy, load, remembered, resume
from support.scripts import (
    changed_fork,
    read_rollouts,
    reward_of,
    run_in_pool,
    trained,
    write_rows,
)

NUM_STEPS = 3
COMMON = f"--num-steps {NUM_STEPS} --save-every 1 --keep-checkpoints 0 --eval-every 2 --prompts-per-step 3"
COMMON += " --num-epochs 2 --num-minibatches 2 --group-size 3"
CASES = {
    "grpo": ("train_grpo.py", "--dynamic-sampling --kl-coef 0.01"),
    "skips": ("train_grpo.py", ""),
    "ppo": ("train_ppo.py", "--kl-reward-coef 0.05 --kl-target 0.1 --value-warmup-steps 1"),
}
RUN = '    run = Run(setup, {"policy": (policy, optimizer)}, collector'
REPORT = '        metrics.begin("report")  # before'
# A fork's changes in train_grpo.py: a keyword of `Run`, and lines before the report.
CURRICULUM = {
    RUN: f"{RUN}, extra={{'curriculum': {{'level': 0, 'mean': torch.ones((), dtype=torch.float64)}}}}",
    REPORT: """\
        curriculum = progress.extra["curriculum"]
        curriculum["mean"] = 0.9 * curriculum["mean"] + 0.1 * groups.scores.mean()
        curriculum["level"] += int(curriculum["mean"] > 0.8)  # two steps are
        collector.num_served += curriculum["level"]
"""
    + REPORT,
}
POOLS = {1: "one_rank", 2: "two_ranks"}
EVERY_SPLIT = range(NUM_STEPS + 1)


@pytest.mark.parametrize(
    ("case", "num_ranks", "splits"),
    [
        slow("grpo", 2, EVERY_SPLIT),
        slow("skips", 2, [1]),
        slow("ppo", 2, EVERY_SPLIT),
        ("grpo", 1, [1]),
    ],
    ids=lambda value: str(value) if isinstance(value, int | str) else "-".join(map(str, value)),
)
def test_row_12_a_run_split_after_any_step_is_the_uninterrupted_run(request, runs, case, num_ranks, splits):
    """Several epochs and minibatches per batch, refills, KL terms, an adapted coefficient, a value model's warm-up.

    Rows 1, 12 and 40: resuming after the last step does nothing and says so; numbers come once, half a line is dropped.
    Faults 1 and 40. Pitfalls 57 and 61.
    """
    pool = request.getfixturevalue(POOLS[num_ranks])
    script, flags = CASES[case]
    folder = trained(pool, runs / f"{case}-{num_ranks}", script, COMMON, flags)
    expected = digests(folder)
    assert sum(key.startswith("metrics") for key in expected) == NUM_STEPS
    assert sum(key.endswith(".safetensors") for key in expected) == NUM_STEPS * (1 + (case == "ppo"))
    assert sum(key.endswith(".pt models") for key in expected) == NUM_STEPS * num_ranks
    for last_step in splits:
        output = resume(pool, script, folder, COMMON, flags, last_step=last_step)
        assert ("already finished" in output) == (last_step == NUM_STEPS)


def assert_same_samples_on_one_rank(one_rank: RankPool, script: str, folder: Path, *flags: str) -> None:
    """A run of two ranks goes on with one after its first step."""
    copy = interrupted_copy(folder, f"{folder.name}-fewer", 1)
    run_in_pool(one_rank, script, *flags, f"--run-name {copy.name}", runs=copy.parent)
    fewer, whole = ([(r["id"], r["completion"]) for r in read_rollouts(run, 2)] for run in (copy, folder))
    assert fewer == whole
    assert [path.name for path in sorted((copy / "checkpoints").iterdir())] == ["000001", "000002", "000003"]


@pytest.mark.slow
def test_row_51_a_resume_needs_the_folder_of_the_run_only(one_rank, runs, embedded_model, tmp_path):
    """Not the models that it began with, nor the checkpoint of another run."""
    script, flags = "train_ppo.py", "--value-warmup-steps 1"
    models = [tmp_path / name for name in ("model", "value-model")]
    for model in models:
        shutil.copytree(embedded_model, model)
        flags += f" --{model.name} {model}"
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": f"{i}32=", "answer": "2"} for i in range(10)])
    flags += f" --lr 1e-3 --data {data} --eval-data {data} {reward_of(tmp_path, 'float(len(c))')}"
    folder = trained(one_rank, runs / "own", script, COMMON, flags)
    for model in models:
        shutil.rmtree(model)
    resume(one_rank, script, folder, COMMON, flags)


@pytest.mark.slow
def test_row_11_a_run_goes_on_with_another_number_of_ranks(runs, one_rank, two_ranks):
    """From two ranks to one: the same prompts and, given equal weights, the same samples."""
    script, flags = CASES["grpo"]
    folder = trained(two_ranks, runs / "grpo-2", script, COMMON, flags)
    assert_same_samples_on_one_rank(one_rank, script, folder, COMMON, flags)


@pytest.mark.slow
def test_a_fork_remembers_tensors_over_a_resume(one_rank, two_ranks, runs, tmp_path):
    """Fault 12: a curriculum, from two ranks to one. The forks of docs/examples are resumed to the same bits."""
    fork = changed_fork(tmp_path, "fork_curriculum", CURRICULUM)
    folder = trained(two_ranks, runs / "curriculum", fork, COMMON)
    fewer = interrupted_copy(folder, "curriculum-fewer", 2)
    run_in_pool(one_rank, fork, f"{COMMON} --run-name {fewer.name}", runs=runs)
    levels = [remembered(run / "checkpoints" / "000003", "curriculum")["level"] for run in (folder, fewer)]
    assert levels == [2, 2]


@pytest.mark.parametrize("later", ["--max-staleness 2", slow("--max-staleness 0")])
def test_row_12_a_resume_begins_the_prompts_in_flight_again(two_ranks, runs, later):
    """None is lost or served twice: those of a run that was killed, also with another bound of staleness."""
    flags = f"{COMMON} --max-staleness 2"
    folder = trained(two_ranks, runs / "partial", "train_grpo.py", flags)
    copy = interrupted_copy(folder, f"partial-{later[-1]}", 2)
    in_flight = load(copy / "checkpoints" / "000002" / "resume" / "progress.pt")["in_flight"]
    assert in_flight
    more = (COMMON, later, "--num-steps 5", f"--run-name {copy.name}")
    run_in_pool(two_ranks, "train_grpo.py", *more, runs=runs)
    trained_on = [{r["id"][0] for r in read_rollouts(copy, step)} for step in range(1, 6)]
    assert sum(map(len, trained_on)) == len(set.union(*trained_on)) == 5 * 3
    assert set(in_flight) & set.union(*trained_on[2:])
    progress = load(copy / "checkpoints" / "000005" / "resume" / "progress.pt")
    assert set.union(*trained_on, progress["in_flight"]) == {*range(progress["num_served"])}


@pytest.mark.slow
def test_row_13_a_script_that_remembers_more_than_the_checkpoint_begins_with_its_first_value(
    one_rank, runs, tmp_path
):
    """And what a script no longer knows stays in its checkpoints."""
    fork = changed_fork(tmp_path, "fork_curriculum", CURRICULUM)
    flags = f"{COMMON} --run-name curriculum-new --num-steps"
    for script, num_steps in (("train_grpo.py", 1), (fork, 2), ("train_grpo.py", 3)):
        run_in_pool(one_rank, script, flags, str(num_steps), runs=runs)
    saved = [
        remembered(path, "curriculum")
        for path in sorted((runs / "curriculum-new" / "checkpoints").iterdir())[1:]
    ]
    assert saved[0] == saved[1]
