"""Everything around the loop: folders, copies of a run's inputs, held-out files, rewards that do not apply."""

import gc
import json
import math
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minirl.errors import InputError
from minirl.model import batch_invariance
from minirl.run import setup
from minirl.run.config import RunConfig
from minirl.run.run import Progress, Run
from minirl.run.run_folder import RunFolder
from support.jobs import SLACK, started
from support.marks import slow
from support.scripts import (
    ROOT,
    SCRIPTS,
    read_metrics,
    read_rollouts,
    reward_of,
    run_in_pool,
    trained,
    untimed,
    write_rows,
)

TINY = "--num-steps 2 --prompts-per-step 4 --group-size 4 --save-every 1"


def test_no_collection_looks_again_through_what_is_there_before_the_first_step():
    loaded = [[] for _ in range(1000)]
    run = SimpleNamespace(progress=Progress(step=3), _config=SimpleNamespace(num_steps=5), _stop_signal=0)
    steps = Run.steps(run)
    try:
        assert next(steps) == 4
        looked_through = {id(found) for found in gc.get_objects()}
        assert gc.get_freeze_count() >= 1000
        assert not any(id(one) in looked_through for one in loaded)
        assert list(steps) == [5]
    finally:
        gc.unfreeze()


# Runs a script, and lists the library's loaded modules when it ends (by `os._exit`).
NAMING = """
import os, runpy, sys
exit_now = os._exit

def name_and_exit(code):
    print("LOADED", *(name for name in sys.modules if name.startswith("minirl.")), flush=True)
    exit_now(code)

os._exit = name_and_exit
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_on_the_cpu_loads_no_extra(runs, tmp_path, script):
    """No kernels of CUDA, no agents, and neither the pictures nor the display of rollouts."""
    command = [sys.executable, "-c", NAMING, str(ROOT / script), *TINY.split(), "--num-steps", "1"]
    with started(tmp_path, [command], MINIRL_RUNS=str(runs)) as job:
        assert job.codes(300) == [0], job.output(0)[-4000:]
        loaded = job.output(0).splitlines()[-1]
    names = loaded.split()
    assert names[0] == "LOADED"
    assert "minirl.generation.engine" in names
    assert [name for name in names if name.startswith("minirl.extras.")] == []


def test_a_cpu_without_bf16_instructions_runs_in_fp32_and_says_what_bf16_costs(monkeypatch, capsys):
    """`--dtype auto` is fp32 on a CPU; bfloat16 prints a note where its products are computed in fp32."""
    for has_instructions in (True, False):
        monkeypatch.setattr(batch_invariance, "has_bf16_instructions", lambda has=has_instructions: has)
        assert setup.compute_dtype("auto", "cpu") == torch.float32
        assert setup.compute_dtype("bfloat16", "cuda") == torch.bfloat16
        assert capsys.readouterr().out == ""
        assert setup.compute_dtype("bfloat16", "cpu") == torch.bfloat16
        assert ("note: --dtype bfloat16" in capsys.readouterr().out) == (not has_instructions)


def test_restarted_ranks_need_the_name_of_their_run(monkeypatch):
    """A new start would not know which run to resume."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setattr(setup.process_group, "start", lambda **_: torch.device("cpu"))
    with pytest.raises(
        InputError, match="--max-restarts: restarted ranks resume the run only with --run-name"
    ):
        setup.Setup(RunConfig(), name="grpo")


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps(one_rank, runs):
    """With a constant learning rate as if it had been asked for all of them at once; a resume says what has changed.

    The last lines say where checkpoint, metrics and rollouts are.
    """

    def train(name, *more):
        flags = f"{TINY} --lr-schedule constant --eval-every 1 --run-name {name}"
        return run_in_pool(one_rank, "train_grpo.py", flags, *more, runs=runs)

    train("grown")
    assert "already finished; a greater --num-steps continues it" in train("grown")
    assert "note: this run last started with other flags: --num-steps 3 (was 2)\n" in train(
        "grown", "--num-steps 3"
    )
    last = [line.split() for line in train("whole", "--num-steps 3").splitlines()[-3:]]
    assert [line[0] for line in last] == ["metrics", "rollouts", "checkpoint"]
    assert all(Path(line[1]).exists() for line in last)
    grown, whole = ([untimed(line) for line in read_metrics(runs / name)] for name in ("grown", "whole"))
    assert len(grown) == 3
    assert grown == whole


def test_a_config_that_is_far_too_large_for_its_weights_is_refused_at_once(one_rank, runs, tmp_path):
    """Before anything of that size is made or measured."""
    (source,) = runs.glob("toy-*")
    folder = tmp_path / "large"
    shutil.copytree(source, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"hidden_size": 2**20, "vocab_size": 2**20}))
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "12="}])
    flags = f"--model {folder} --data {data} {reward_of(tmp_path, '1.0')}"
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"embed_tokens.weight has shape \[16, 128\], the model's has"):
        run_in_pool(one_rank, "train_grpo.py", flags, runs=runs)
    assert time.monotonic() - began < 10 * SLACK


PARTIAL = {"max_staleness": 8, "correction": "none"}
CORRECTED = {"correction": "token_truncate"}


@pytest.mark.parametrize(
    ("fields", "num_updates", "source"),
    [
        ({}, 1, "auto"),
        ({}, 2, "sampled"),
        (CORRECTED, 1, "auto"),
        (CORRECTED, 2, "scored"),
        (PARTIAL, 1, "sampled"),
        (PARTIAL, 2, "sampled"),
        (PARTIAL | CORRECTED, 1, "auto"),
        (PARTIAL | CORRECTED, 2, "scored"),
        ({"max_staleness": 8}, 1, "auto"),
        ({"max_staleness": 8}, 2, "scored"),
    ],
)
def test_the_ratio_or_importance_weights_are_to_the_weights_that_sampled(fields, num_updates, source):
    """A scoring pass is made only where neither the sampled logprobs nor those of the update itself will do."""
    config = RunConfig(num_minibatches=num_updates, **fields)
    assert setup.source_of_old_logprobs(config, is_exact=True) == source
    assert setup.source_of_old_logprobs(config, is_exact=False) == (
        "scored" if source == "sampled" and not config.max_staleness else source
    )


@pytest.mark.parametrize("script", [SCRIPTS[0], slow(SCRIPTS[1])])
def test_a_completion_without_a_reward_has_no_advantage_and_no_part_in_the_loss(
    two_ranks, runs, tmp_path, script
):
    """Its reward is null in the files; numbers stay finite; the others' advantages are by the others alone."""
    reward = reward_of(tmp_path, "None if c.endswith(tuple('13579')) else float(len(c))")
    flags = f"{TINY} --prompts-per-step 8 --num-minibatches 1 {reward}"
    folder = trained(two_ranks, runs / f"none-{script}", script, flags)
    for step, line in enumerate(read_metrics(folder), 1):
        assert None not in line.values()
        assert 0 < line["reward/not_applicable"] < 1
        rollouts = read_rollouts(folder, step)
        without = [rollout for rollout in rollouts if rollout["reward"] is None]
        assert len(without) == round(len(rollouts) * line["reward/not_applicable"])
        assert all(rollout["advantage"] == 0 for rollout in without)
        assert all(rollout["rewards"]["mine"] is None for rollout in without)
        rewards = [rollout["reward"] for rollout in rollouts if rollout["reward"] is not None]
        assert line["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        if script == "train_grpo.py":
            for prompt in {rollout["id"][0] for rollout in rollouts}:
                group = [rollout["advantage"] for rollout in rollouts if rollout["id"][0] == prompt]
                assert math.fsum(group) == pytest.approx(0, abs=1e-5)


def test_the_script_that_ran_last_is_kept(tmp_path, monkeypatch):
    """Also where it runs from the run's folder; other names do not count as scripts."""
    script = tmp_path / "my_grpo.py"
    folder = RunFolder(tmp_path / "run", {}, None, None)
    folder.path.mkdir()
    monkeypatch.setattr(sys, "argv", [str(script), "--lr", "1"])
    for text in ("first", "second"):
        script.write_text(text)
        folder.keep_script()
        assert (folder.path / "my_grpo.py").read_text() == text
    for name in (str(folder.path / "my_grpo.py"), "-c"):
        monkeypatch.setattr(sys, "argv", [name])
        folder.keep_script()
    assert [path.read_text() for path in folder.path.iterdir()] == ["second"]
