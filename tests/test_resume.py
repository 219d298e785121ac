"""A resumed run equals the uninterrupted run bitwise: tensors, optimizer state, samples, rollouts and metrics."""

import pytest

from support.marks import slow
from support.resuming import interrupted_copy, load, resume
from support.scripts import read_rollouts, run_in_pool, trained

NUM_STEPS = 3
COMMON = f"--num-steps {NUM_STEPS} --save-every 1 --keep-checkpoints 0 --eval-every 2 --prompts-per-step 3"
COMMON += " --num-epochs 2 --num-minibatches 2 --group-size 3"
CASES = {
    "skips": ("train_grpo.py", ""),
    "grpo": ("train_grpo.py", "--dynamic-sampling --kl-coef 0.01"),
    "ppo": ("train_ppo.py", "--kl-reward-coef 0.05 --value-warmup-steps 1"),
}
EVERY_SPLIT = range(NUM_STEPS + 1)


@pytest.mark.parametrize(
    ("case", "ranks", "splits"),
    [
        slow("grpo", "two_ranks", EVERY_SPLIT),
        slow("ppo", "two_ranks", EVERY_SPLIT),
        ("skips", "one_rank", [1]),
    ],
)
def test_row_12_a_run_split_after_any_step_is_the_uninterrupted_run(request, runs, case, ranks, splits):
    """Cases: several epochs and minibatches per batch, refills, KL terms, a value model's warm-up.

    Rows 1, 12 and 40: resuming after the last step does nothing and says so; each step is logged once, and a partial
    line is dropped. Faults 1 and 40. Pitfalls 57 and 61.
    """
    pool = request.getfixturevalue(ranks)
    script, flags = CASES[case]
    folder = trained(pool, runs / case, script, COMMON, flags)
    for last_step in splits:
        output = resume(pool, script, folder, COMMON, flags, last_step=last_step)
        assert ("already finished" in output) == (last_step == NUM_STEPS)


def test_rows_11_and_12_a_resume_requeues_the_prompts_in_flight(one_rank, two_ranks, runs):
    """No prompt is lost or drawn twice, even if the resumed run has another world size and --max-staleness."""
    flags = f"{COMMON} --max-staleness 2"
    folder = trained(two_ranks, runs / "partial", "train_grpo.py", flags)
    copy = interrupted_copy(folder, "partial-0", 2)
    in_flight = load(copy / "checkpoints" / "000002" / "resume" / "progress.pt")["in_flight"]
    assert in_flight
    more = (COMMON, "--max-staleness 0 --num-steps 5", f"--run-name {copy.name}")
    run_in_pool(one_rank, "train_grpo.py", *more, runs=runs)
    trained_on = [{r["id"][0] for r in read_rollouts(copy, step)} for step in range(1, 6)]
    assert sum(map(len, trained_on)) == len(set.union(*trained_on)) == 5 * 3
    assert set(in_flight) & set.union(*trained_on[2:])
    progress = load(copy / "checkpoints" / "000005" / "resume" / "progress.pt")
    assert set.union(*trained_on, progress["in_flight"]) == {*range(progress["num_served"])}
