"""Everything around the loop: folders, copies of a run's inputs, held-out files, rewards that do not apply."""

import json
import shutil
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

from minirl.model import batch_invariance
from minirl.run import setup
from minirl.run.config import RunConfig
from minirl.run.run_folder import RunFolder
from support.marks import slow
from support.scripts import (
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


def test_a_cpu_without_bf16_instructions_says_what_bf16_costs(monkeypatch, capsys):
    """`--dtype auto` is fp32 on a CPU; bfloat16 prints a note where its products are computed in fp32."""
    assert setup.compute_dtype("auto", "cpu") == torch.float32
    for has_instructions in (True, False):
        monkeypatch.setattr(batch_invariance, "has_bf16_instructions", lambda has=has_instructions: has)
        assert setup.compute_dtype("bfloat16", "cpu") == torch.bfloat16
        assert ("note: --dtype bfloat16" in capsys.readouterr().out) == (not has_instructions)


@pytest.mark.slow
def test_row_51_a_finished_run_goes_on_with_more_steps_without_the_model_that_it_began_with(
    one_rank, runs, embedded_model, tmp_path
):
    """With a constant learning rate as if it had been asked for all of them at once; a resume says what has changed.

    The last lines say where checkpoint, metrics and rollouts are.
    """
    model = tmp_path / "model"
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": f"{i}32=", "answer": "2"} for i in range(10)])
    flags = f"{TINY} --model {model} --lr 1e-3 --lr-schedule constant --eval-every 1 --data {data} --eval-data {data}"
    flags += f" --max-new-tokens 20 {reward_of(tmp_path, 'float(len(c))')}"

    def train(name, *more):
        return run_in_pool(one_rank, "train_grpo.py", flags, f"--run-name {name}", *more, runs=runs)

    shutil.copytree(embedded_model, model)
    last = [line.split() for line in train("whole", "--num-steps 3").splitlines()[-3:]]
    assert [line[0] for line in last] == ["metrics", "rollouts", "checkpoint"]
    assert all(Path(line[1]).exists() for line in last)
    train("grown")
    shutil.rmtree(model)
    assert "already finished; a greater --num-steps continues it" in train("grown")
    changed = "note: this run last started with other flags: --num-steps 3 (was 2)\n"
    assert changed in train("grown", "--num-steps 3")
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
    for more in ("", "--dry-run"):
        with pytest.raises(
            AssertionError, match=r"embed_tokens.weight has shape \[16, 128\], the model's has"
        ):
            run_in_pool(one_rank, "train_grpo.py", flags, more, runs=runs)


@pytest.mark.parametrize(
    ("fields", "num_updates", "source"),
    [
        ({}, 1, "auto"),
        ({}, 2, "sampled"),
        ({"correction": "token_truncate"}, 1, "auto"),
        ({"correction": "token_truncate"}, 2, "scored"),
        ({"correction": "none", "max_staleness": 8}, 1, "sampled"),
        ({"correction": "none", "max_staleness": 8}, 2, "sampled"),
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
    """Its reward is null in the files; numbers stay finite; GRPO's advantages are by the others' mean alone."""
    reward = reward_of(tmp_path, "None if c.endswith(tuple('13579')) else float(len(c))")
    flags = f"{TINY} --prompts-per-step 8 --num-minibatches 1 {reward}"
    folder = trained(two_ranks, runs / f"none-{script}", script, flags)
    for step, line in enumerate(read_metrics(folder), 1):
        assert None not in line.values()
        rollouts = read_rollouts(folder, step)
        without = [rollout for rollout in rollouts if rollout["reward"] is None]
        assert 0 < len(without) == round(len(rollouts) * line["reward/not_applicable"])
        assert {rollout["advantage"] for rollout in without} == {0}
        rewards = [rollout["reward"] for rollout in rollouts if rollout["reward"] is not None]
        assert line["reward/mean"] == pytest.approx(fmean(rewards))
        if script == "train_grpo.py":
            for prompt in {rollout["id"][0] for rollout in rollouts}:
                group = [rollout["advantage"] for rollout in rollouts if rollout["id"][0] == prompt]
                assert sum(group) == pytest.approx(0, abs=1e-5)


def test_the_script_that_ran_last_is_kept(tmp_path, monkeypatch):
    """Also where it runs from the run's folder; other names do not count as scripts."""
    folder = RunFolder(tmp_path / "run", {}, None, None)
    folder.path.mkdir()
    script = tmp_path / "my_grpo.py"
    script.write_text("text")
    for name in (script, folder.path / "my_grpo.py", "-c"):
        monkeypatch.setattr(sys, "argv", [str(name)])
        folder.keep_script()
        assert [path.read_text() for path in folder.path.iterdir()] == ["text"]
