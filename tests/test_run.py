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
from minirl.ranks.process_group import launcher
from minirl.run import input_files, setup
from minirl.run.config import RunConfig
from minirl.run.input_files import changed_inputs, input_digests, keep_script
from minirl.run.run import Progress, Run
from minirl.run.run_folder import read_args, run_before_restart
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

TINY = "--num-steps 2 --prompts-per-step 4 --eval-rows 4 --group-size 4 --save-every 1"


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
def test_a_run_on_the_cpu_loads_no_annex(runs, tmp_path, script):
    """No kernels of CUDA, no agents, and neither the pictures nor the display of rollouts."""
    command = [sys.executable, "-c", NAMING, str(ROOT / script), *TINY.split(), "--num-steps", "1"]
    with started(tmp_path, [command], MINIRL_RUNS=str(runs)) as job:
        assert job.codes(300) == [0], job.output(0)[-4000:]
        loaded = job.output(0).splitlines()[-1]
    names = loaded.split()
    assert names[0] == "LOADED"
    assert "minirl.generation.engine" in names
    annexes = ("minirl.kernels", "minirl.agents", "minirl.show", "minirl.plot")
    assert [name for name in names if name.startswith(annexes)] == []


def test_a_cpu_without_bf16_instructions_runs_in_fp32_and_says_what_bf16_costs(monkeypatch, capsys):
    """`--dtype auto` is fp32 on a CPU; bfloat16 prints a note where its products are computed in fp32."""
    for has_instructions in (True, False):
        monkeypatch.setattr(batch_invariance, "has_bf16_instructions", lambda has=has_instructions: has)
        assert setup.compute_dtype("auto", "cpu") == torch.float32
        assert setup.compute_dtype("bfloat16", "cuda") == torch.bfloat16
        assert capsys.readouterr().out == ""
        assert setup.compute_dtype("bfloat16", "cpu") == torch.bfloat16
        assert ("note: --dtype bfloat16" in capsys.readouterr().out) == (not has_instructions)


def test_restarted_ranks_find_the_run_of_the_same_torchrun(tmp_path, monkeypatch):
    """And no other's, whatever lies among the runs; the first attempt looks for none."""
    monkeypatch.setenv("MINIRL_RUNS", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for name, text in (("a", "["), ("b", "{}"), ("c", json.dumps({"launcher": launcher()}))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text(text)
    for restarts, run_id, found in (("1", "7", None), ("1", "none", "c"), ("0", "none", None)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        assert run_before_restart() == found


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps(one_rank, runs):
    """With a constant learning rate as if it had been asked for all of them at once; fewer steps are refused.

    The last lines say where checkpoint, metrics and rollouts are.
    """

    def train(name, *more):
        flags = f"{TINY} --lr-schedule constant --eval-every 1 --run-name {name}"
        return run_in_pool(one_rank, "train_grpo.py", flags, *more, runs=runs)

    train("grown")
    assert "already finished; a greater --num-steps continues it" in train("grown")
    train("grown", "--num-steps 3")
    last = [line.split() for line in train("whole", "--num-steps 3").splitlines()[-3:]]
    assert [line[0] for line in last] == ["metrics", "rollouts", "checkpoint"]
    assert all(Path(line[1]).exists() for line in last)
    grown, whole = ([untimed(line) for line in read_metrics(runs / name)] for name in ("grown", "whole"))
    assert len(grown) == 3
    assert grown == whole
    with pytest.raises(AssertionError, match=r"--num-steps 2 \(was 3\)"):
        train("grown")


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
        (PARTIAL | {"old_logprobs": "scored"}, 1, "scored"),
        ({"max_staleness": 8}, 1, "auto"),
        ({"max_staleness": 8}, 2, "scored"),
        ({"max_staleness": 8, "old_logprobs": "sampled"}, 1, "sampled"),
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


def test_the_script_is_kept_and_a_later_version_beside_it(tmp_path, monkeypatch):
    """The first copy is never overwritten; the same version is not kept twice; other names do not count as scripts."""
    script = tmp_path / "my_grpo.py"
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr(input_files.sys, "argv", [str(script), "--lr", "1"])
    for step, text in ((0, "first"), (5, "first"), (7, "second"), (9, "second")):
        script.write_text(text)
        keep_script(folder, step=step)
    kept = {path.name: path.read_text() for path in folder.iterdir()}
    assert kept == {"my_grpo.py": "first", "my_grpo-from-step-8.py": "second"}
    monkeypatch.setattr(input_files.sys, "argv", ["-c"])
    keep_script(folder, step=10)
    assert len(list(folder.iterdir())) == 2


def test_inputs_that_have_changed_are_named(tmp_path, monkeypatch):
    """Script, data and reward files; not a new or missing one, and nothing at the first start."""
    files = {name: tmp_path / name for name in ("my.py", "train.jsonl", "held.jsonl", "reward.py")}
    for path in files.values():
        path.write_text("before")
    monkeypatch.setattr(input_files.sys, "argv", [str(files["my.py"])])
    config = RunConfig(
        data=str(files["train.jsonl"]),
        eval_data=(str(files["held.jsonl"]),),
        reward=(f"{files['reward.py']}:f", "minirl.data.gsm8k:strict_score"),
    )
    before = input_digests(config)
    assert set(before) == set(map(str, files.values()))
    assert changed_inputs({}, before) == []
    args = {"flags": {}, "inputs": before}
    assert changed_inputs(args, before) == []
    files["reward.py"].write_text("after")
    files["held.jsonl"].unlink()
    assert changed_inputs(args, input_digests(config)) == [str(files["reward.py"])]


def test_changed_data_is_refused_and_a_changed_reward_is_said(one_rank, runs, tmp_path):
    """A run on other data is another run: it needs --resume force. A mended reward may go on. Fault 13."""
    rows = [{"prompt": f"{i}32=", "answer": "x"} for i in range(1, 6)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    flags = f"{TINY} --data {data} {reward_of(tmp_path, 'float(len(c))')} --run-name inputs"

    def train(*more):
        return run_in_pool(one_rank, "train_grpo.py", flags, *more, runs=runs)

    train()
    reward_of(tmp_path, "1.0 * len(c)")
    assert f"note: {tmp_path}/mine.py has changed since this run last started" in train("--num-steps 3")
    write_rows(data, reversed(rows))
    with pytest.raises(AssertionError, match=r"data\.jsonl: the data has changed.*--resume force"):
        train("--num-steps 4")
    assert f"note: {data} has changed" in train("--num-steps 4 --resume force")
    assert [line["step"] for line in read_metrics(runs / "inputs")] == [1, 2, 3, 4]


@pytest.mark.parametrize("content", ["{", "[]", '{"flags": []}', '{"flags": {}, "inputs": 3}', "[" * 99_999])
def test_damaged_args_are_refused_by_name(tmp_path, content):
    """Neither a traceback nor a fresh start over the run."""
    (tmp_path / "args.json").write_text(content)
    with pytest.raises(InputError, match=r"args\.json: is damaged; restore it, or choose another --run-name"):
        read_args(tmp_path)
