"""`--dry-run` says what can be checked by hand, loads and writes nothing, and refuses what does not fit."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import train_grpo
import train_ppo
from minirl.errors import InputError
from minirl.run import setup
from minirl.run.config import RunConfig
from minirl.run.embedded_model import write_shape
from minirl.run.planning import Machine
from minirl.run.setup import Setup
from support.models import QWEN_05B, QWEN_7B, QWEN_32B
from support.scripts import run_in_pool, write_rows

REWARD = """
def mean_digit(completions, answer):
    return [len(completion) / 2 for completion in completions]
"""
TINY = "--num-steps 1 --prompts-per-step 4 --group-size 4 --save-every 1"


@pytest.fixture
def flags(tmp_path):
    """Of a model's config: a folder without weights, data with a prompt of 300 tokens, a reward; a config's fields."""

    def of_model(raw):
        (tmp_path / "model").mkdir()
        write_shape(tmp_path / "model")
        (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
        rows = [{"prompt": "1" * 300, "answer": "1234"}, {"prompt": "2" * 20, "answer": "2"}]
        data = write_rows(tmp_path / "data.jsonl", rows)
        (tmp_path / "rewards.py").write_text(REWARD)
        paths = {"model": f"{tmp_path}/model", "data": str(data)}
        paths["reward"] = (f"{tmp_path}/rewards.py:mean_digit",)
        return {"dry_run": True, "prompts_per_step": 128, "max_new_tokens": 512, **paths}

    return of_model


def dry_run(module, **fields):
    """The script's output and exit code."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = module.main(module.Config(**fields))
    return printed.getvalue(), code


def number(printed, name):
    """The number after a name, as it stands there."""
    return float(re.search(rf"{re.escape(name)} ([\d.,]+)", printed)[1].replace(",", ""))


def test_seven_billion_parameters_on_eight_gpus_of_80_gb(flags):
    """By hand, P = 7.6156e9: 2 P = 15.2, 12 P / 8 = 11.4, 4 P / 8 = 3.81 GB; 72 GB are used."""
    printed, code = dry_run(train_grpo, **flags(QWEN_7B), gpus="8x80", kl_coef=0.1)
    assert code == 0
    assert len(printed.splitlines()) <= 10
    assert "7,615,616,512 parameters, torch.bfloat16 on 8 x cuda" in printed
    assert "2 prompts, the longest 300 tokens" in printed
    held = {"weights": 15.2, "masters and moments": 11.4, "gradients": 3.81}
    assert {name: number(printed, name) for name in held} == held
    assert "recompute_layers False, shard_gradients True" in printed
    # A rank decodes 128 completions, and a greedy one of each of 16 prompts. A cached token takes 4 x 28 x 512 bytes.
    assert number(printed, "cache_tokens") == 144 * (812 + 256)
    assert number(printed, "cache") == pytest.approx(144 * 1068 * 57_344 / 1e9, rel=0.01)
    # 8,192 tokens keep 28.4 x 171 kB each, so the cache has no room beside an update.
    assert number(printed, "activations") == pytest.approx(8192 * 28.4 * 171_008 / 1e9 + 1.09, abs=0.05)
    assert "the cache is made again" in printed


def test_ranks_decode_from_shards_if_whole_weights_do_not_fit(flags):
    """32B with the optimizer on the host: a rank holds 2 P / 8."""
    large = flags(QWEN_32B) | {"max_new_tokens": 4096, "offload_optimizer": True}
    printed, _ = dry_run(train_grpo, **large, gpus="8x80")
    assert "shard_gradients True, decode_group 8" in printed
    assert number(printed, "weights") == 8.19
    whole, _ = dry_run(train_grpo, **large, gpus="8x200")
    assert "decode_group 1" in whole
    assert number(whole, "weights") == 65.5
    with pytest.raises(InputError, match="--decode-group N"):
        dry_run(train_grpo, **large, gpus="8x80", decode_group=1)


def test_a_teacher_is_counted_where_it_is(flags, tmp_path):
    """By hand: 7.6156e9 parameters, less 2 x 128 rows of 3,584, of 2 bytes each."""
    fields = flags(QWEN_05B)
    teacher = tmp_path / "teacher"
    shutil.copytree(fields["model"], teacher)
    (teacher / "config.json").write_text(json.dumps(QWEN_7B))
    parked, code = dry_run(train_grpo, **fields, gpus="1x80", teacher=str(teacher))
    assert code == 0
    assert number(parked, "a parked model") == pytest.approx(2 * (7.6156e9 - 2 * 128 * 3584) / 1e9, rel=0.01)


class OfTwoCritics(train_ppo.Config):
    @property
    def num_value_models(self):
        return 2


def test_further_value_models_have_room(flags, monkeypatch):
    """Of one value model of 0.494e9 parameters and two."""
    fields = flags(QWEN_05B)
    found = []
    for config_class in (train_ppo.Config, OfTwoCritics):
        monkeypatch.setattr(train_ppo, "Config", config_class)
        found.append(dry_run(train_ppo, **fields, gpus="1x80")[0])
    weights = [number(printed, "weights") for printed in found]
    moments = [number(printed, "masters and moments") for printed in found]
    assert weights[1] - weights[0] == pytest.approx(0.988, abs=0.01)
    assert moments[1] - moments[0] == pytest.approx(6 * 0.988, abs=0.06)


def test_stale_rollouts_have_room_beside_those_of_the_step(flags):
    """The prompts of two steps are open, whose completions may have nearly all their tokens when they go on."""
    model = flags(QWEN_05B) | {"gpus": "2x80", "prompts_per_step": 16, "max_new_tokens": 1024}
    whole, _ = dry_run(train_grpo, **model)
    partial, _ = dry_run(train_grpo, **model, max_staleness=8)
    # A rank has 8 completions and a greedy one of 8 prompts, or of 16.
    assert number(whole, "cache_tokens") == 72 * (1324 + 256)
    assert number(partial, "cache_tokens") == 144 * (1324 + 256)


def test_what_does_not_fit_is_refused_with_the_flags_to_change(flags):
    """The models themselves, or a size that was given. Fault 38."""
    fields = flags(QWEN_05B)
    flags_that_help = "--model.*--nproc-per-node.*--offload-optimizer.*--max-tokens-per-microbatch"
    with pytest.raises(InputError, match=f"6 GB is too small .*weights 0.988.*{flags_that_help}"):
        dry_run(train_grpo, **fields, gpus="1x6")
    with pytest.raises(InputError, match=flags_that_help):
        dry_run(train_grpo, **fields, gpus="1x24", max_tokens_per_microbatch=50_000, recompute_layers="off")
    with pytest.raises(InputError, match="--cache-tokens"):
        dry_run(train_grpo, **fields, gpus="1x24", cache_tokens=10_000_000)
    given = {"cache_tokens": 8192, "max_tokens_per_microbatch": 8192, "recompute_layers": "on"}
    with pytest.raises(InputError, match="--dry-run: the run does not fit"):
        dry_run(train_grpo, **fields, gpus="1x6", **given)


def test_the_first_prompt_is_shown_as_the_model_reads_it(flags):
    printed, _ = dry_run(train_grpo, **flags(QWEN_05B), gpus="1x24")
    assert re.search(r"data.jsonl:\d: '(1{300}|2{20})'", printed)


def test_weights_that_are_there_must_be_the_model_s(flags):
    """Their names and shapes are read: a real run would refuse them too."""
    fields = flags(QWEN_05B)
    save_file({"model.norm.weight": torch.ones(3)}, f"{fields['model']}/model.safetensors")
    with pytest.raises(InputError, match="missing tensors"):
        dry_run(train_grpo, **fields, gpus="1x24")


@pytest.mark.parametrize("module", [train_grpo, train_ppo])
def test_the_embedded_model_is_not_made_and_no_folder_is(module, tmp_path, monkeypatch):
    """On this machine, whatever it has."""
    monkeypatch.setenv("MINIRL_RUNS", str(tmp_path / "runs"))
    printed, code = dry_run(module, dry_run=True)
    assert code == 0
    assert "592,768 parameters, torch.float32 on 1 x cpu" in printed
    assert "max_tokens_per_microbatch 8192, recompute_layers False" in printed
    assert not (tmp_path / "runs").exists()


def test_a_script_that_lacks_the_call_trains_nothing():
    """A copy of an older script takes the flag too."""
    with pytest.raises(InputError, match="--dry-run: this script lacks"):
        Setup(RunConfig(dry_run=True), name="old")


def test_a_resumed_run_sums_gradients_as_it_began_to(one_rank, runs):
    """Microbatches and sharding, whatever memory there is now: otherwise sums would round differently."""
    flags = f"{TINY} --run-name sizes"
    output = run_in_pool(one_rank, "train_grpo.py", flags, runs=runs)
    assert output.count("memory max_running_requests 256, cache_tokens 65536") == 1
    path: Path = runs / "sizes" / "args.json"
    args = json.loads(path.read_text())
    assert args["max_tokens_per_microbatch"] == 8192
    assert args["flags"]["max_tokens_per_microbatch"] == "auto"
    assert args["shard_gradients"] is False
    path.write_text(json.dumps({**args, "max_tokens_per_microbatch": 40, "shard_gradients": True}))
    output = run_in_pool(one_rank, "train_grpo.py", flags, "--num-steps 2", runs=runs)
    assert "max_tokens_per_microbatch 40," in output
    assert "shard_gradients True" in output
    assert json.loads(path.read_text())["max_tokens_per_microbatch"] == 40


def on_a_full_machine():
    """A patch under which a run finds a megabyte free."""
    machine = Machine("cpu", num_ranks=1, ranks_of_node=1, free=1e6)
    return mock.patch.object(setup, "this_machine", return_value=machine)


def test_row_38_a_run_that_cannot_fit_is_refused_before_models_are_loaded(one_rank, runs):
    """And leaves no folder. With all sizes given it starts: they may be known better."""
    how = {"runs": runs, "under": on_a_full_machine}
    with pytest.raises(AssertionError, match=r"InputError: a rank with 0.001 GB is too small"):
        run_in_pool(one_rank, "train_grpo.py", TINY, "--run-name small", **how)
    assert not (runs / "small").exists()
    sizes = "--cache-tokens 512 --max-tokens-per-microbatch 99 --recompute-layers off"
    run_in_pool(one_rank, "train_grpo.py", TINY, sizes, "--run-name given", **how)
