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
from minirl.errors import InputError, RewardError
from minirl.model.families import scalar_config
from minirl.run import setup
from minirl.run.config import RunConfig
from minirl.run.embedded_model import write_shape
from minirl.run.setup import Setup
from support.models import QWEN_05B, QWEN_7B, QWEN_32B
from support.scripts import run_in_pool, write_rows

REWARD = """
def mean_digit(completions, answer):
    return [len(completion) / 2 for completion in completions]
def broken(completions):
    raise ValueError("no")
"""
TINY = "--num-steps 1 --prompts-per-step 4 --eval-rows 4 --group-size 4 --save-every 1"


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


def test_it_says_what_decoding_from_shards_saves_and_costs_and_why_it_is_chosen(flags):
    """By hand, 32B: 2 P = 65.5 GB, and 64 x 4 + 2 gathers."""
    large = flags(QWEN_32B) | {"max_new_tokens": 4096, "kl_coef": 0.1, "gpus": "8x80"}
    printed, code = dry_run(train_grpo, **large, offload_optimizer=True)
    assert code == 0
    assert (
        "decode   8 ranks together: 8.19 GB of weights on each instead of 65.5 GB, 258 gathers a step; "
        "whole they do not fit: phase score (reference) needs 13" in printed
    )
    assert "--shard-gradients on --shard-decode on --decode-group 8" in printed
    assert number(printed, "weights") == 8.19
    # All 1,024 completions of the group: a cached token takes a rank 4 x 64 x 128 bytes.
    assert number(printed, "--max-running-requests") == 1024
    with pytest.raises(InputError, match=r"phase update needs 96.4 GB of the 72 GB .* --offload-optimizer"):
        dry_run(train_grpo, **large)
    whole, _ = dry_run(train_grpo, **large | {"gpus": "8x200"}, offload_optimizer=True)
    assert (
        "decode   each rank alone, as whole weights fit; 8 together (--shard-decode on): 8.19 GB of weights on each "
        "instead of 65.5 GB, 258 gathers a step" in whole
    )
    assert number(whole, "weights") == 65.5
    with pytest.raises(InputError, match="--shard-decode on, --offload-optimizer, a smaller --model"):
        dry_run(train_grpo, **large, shard_decode="off")


def test_seven_billion_parameters_on_eight_gpus_of_80_gb(flags):
    """By hand, P = 7.6156e9: 2 P = 15.23, 12 P / 8 = 11.42, 4 P = 30.46 GB; 72 GB are used."""
    printed, code = dry_run(train_grpo, **flags(QWEN_7B), gpus="8x80", kl_coef=0.1)
    assert code == 0
    assert "7,615,616,512 parameters, bfloat16 on 8 x cuda" in printed
    assert "2 prompts, the longest 300 tokens" in printed
    # 128 x 8 completions of 300 + 512 tokens; 300 steps of 128 prompts are 19200 times the data.
    assert "1,024 completions of 128 prompts, at most 831,488 tokens: 812 each" in printed
    assert "300 steps, 19,200.00 epochs, 300 updates (1 a step)" in printed
    held = {"weights": 15.2, "masters and moments": 11.4, "gradients": 30.5, "reference": 15.2}
    assert {name: number(printed, name) for name in held} == held
    # Beside them 14.85 GB are left, less 1.09 for the head's gradient (2 V D). A layer keeps A = 8 x 3584 +
    # 6 x 18944 + 8 x 3584 = 171,008 bytes of a token. Without recomputation the most is needed in the
    # head: 28 A + 4 x 3584 bytes a token, 0.27 GB for 2^26 logits in fp32 and 0.13 for their gradient in bf16.
    # So 8,192 tokens do not fit.
    # With it, the most is needed in the last layer: 2 x 28 x 3584 + 1.4 A = 440 kB a token.
    assert "--recompute-layers on" in printed
    assert number(printed, "largest  microbatch") == pytest.approx((13.76e9 - 0.40e9) / 4.803e6, abs=256)
    # A cached token takes 4 x 28 x 512 bytes. A rank decodes 128 completions, and a greedy one of each of 16
    # prompts.
    assert number(printed, "--cache-tokens") == 144 * (812 + 256)
    cache = 144 * 1068 * 57_344
    assert number(printed, "cache") == pytest.approx(cache / 1e9, rel=0.01)
    # It is kept beside microbatches of more than 8,192 tokens, with the logits of the graphs: 144 (4 + 1 / 32) V bytes.
    assert "the cache is kept from step to step" in printed
    assert number(printed, "--max-tokens-per-microbatch") == pytest.approx(
        (13.76e9 - cache - 0.09e9) / 440_115, abs=256
    )
    # Each rank parks a reference, whose tensors torch rounds up to powers of two, and rank 0 copies 2 P + 12 P / 8
    # for a checkpoint.
    assert number(printed, "parked models") == 29.0
    assert number(printed, "of the host") == pytest.approx(28.96 + 15.23 + 11.42, rel=0.01)


def test_a_teacher_is_counted_where_it_scores_and_where_it_is_parked(flags, tmp_path):
    """By hand: 7.6156e9 parameters, less 2 x 128 rows of 3,584, of 2 bytes each."""
    fields = flags(QWEN_05B)
    teacher = tmp_path / "teacher"
    shutil.copytree(fields["model"], teacher)
    (teacher / "config.json").write_text(json.dumps(QWEN_7B))
    printed, code = dry_run(train_grpo, **fields, gpus="1x80", teacher=str(teacher))
    assert code == 0
    assert "score (teacher)" in printed
    assert number(printed, "teacher") == pytest.approx(2 * (7.6156e9 - 2 * 128 * 3584) / 1e9, rel=0.01)
    assert number(printed, "parked models") == pytest.approx(29.0, rel=0.01)
    taught, code = dry_run(train_grpo, **fields, gpus="1x80", teacher=str(teacher), teacher_kl="reverse")
    # The states of 128 x 8 completions of 300 + 512 tokens; the teacher's head, and the policy's gradient once more.
    update = next(line for line in taught.splitlines() if line.startswith("  update"))
    assert number(update, "teacher's states") == pytest.approx(2 * 831_488 * 3584 / 1e9, rel=0.01)
    assert number(update, "teacher's head") == pytest.approx(2 * 151_936 * (3584 + 896) / 1e9, rel=0.01)
    held, code = dry_run(train_grpo, **fields, gpus="1x80", teacher=str(teacher), park_frozen=False)
    assert "teacher 15.2" in next(line for line in held.splitlines() if line.startswith("  always"))


class OfTwoCritics(train_ppo.Config):
    @property
    def num_value_models(self):
        return 2


def test_further_value_models_and_reward_models_have_room(flags, tmp_path, monkeypatch):
    """Of one value model of 0.494e9 parameters and two, one reward model and two of 0.358e9 (without a head)."""
    fields = flags(QWEN_05B)
    (tmp_path / "rm").mkdir()
    (tmp_path / "rm" / "config.json").write_text(json.dumps(scalar_config(QWEN_05B)))
    found = []
    for config_class, count in ((train_ppo.Config, 1), (OfTwoCritics, 2)):
        monkeypatch.setattr(train_ppo, "Config", config_class)
        models = (f"{tmp_path}/rm",) * count
        found.append(dry_run(train_ppo, **fields, gpus="1x80", reward_model=models)[0])
    assert "reward model 2 " in found[1]
    assert "reward model 2 " not in found[0]
    weights = [number(printed, "weights") for printed in found]
    moments = [number(printed, "masters and moments") for printed in found]
    assert weights[1] - weights[0] == pytest.approx(0.988, abs=0.01)
    assert moments[1] - moments[0] == pytest.approx(6 * 0.988, abs=0.06)


def test_stale_rollouts_have_room_beside_those_of_the_step(flags):
    """The prompts of two steps are open, whose completions may have nearly all their tokens when they go on.

    Also those that have no place in the decode batch: they take turns.
    """
    model = flags(QWEN_05B) | {"gpus": "8x80", "prompts_per_step": 8}
    whole, _ = dry_run(train_grpo, **model)
    partial, _ = dry_run(train_grpo, **model, max_staleness=8)
    # A rank has 8 completions and a greedy one of one prompt, or of 2.
    assert number(whole, "--cache-tokens") == 9 * (812 + 256)
    assert number(partial, "--cache-tokens") == 18 * (812 + 256)
    in_turns, _ = dry_run(train_grpo, **model, max_staleness=8, max_running_requests=9)
    assert number(in_turns, "--cache-tokens") == 18 * (812 + 256)
    # 9 sequences of 812 tokens at a time, or as many tokens as the engine prefills together, 8,192.
    assert number(partial, "prefill") > number(whole, "prefill")


def test_what_does_not_fit_is_refused_with_the_flags_to_change(flags):
    """The models themselves, or a size that was given; of PPO two models are trained. Fault 38."""
    fields = flags(QWEN_05B)
    with pytest.raises(InputError, match=r"--dry-run: does not fit: the models need .*--nproc-per-node"):
        dry_run(train_grpo, **fields, gpus="1x6")
    with pytest.raises(InputError, match=r"phase update needs .* GB.*--max-tokens-per-microbatch"):
        dry_run(train_grpo, **fields, gpus="1x24", max_tokens_per_microbatch=50_000, recompute_layers="off")
    with pytest.raises(InputError, match=r"phase generate needs .* GB.*--cache-tokens"):
        dry_run(train_grpo, **fields, gpus="1x24", cache_tokens=10_000_000)
    printed, _ = dry_run(train_ppo, **fields, gpus="1x80")
    assert number(printed, "gradients") == pytest.approx(2 * 1.98, rel=0.01)
    assert "score (value model)" in printed


def test_prompts_are_shown_as_the_model_reads_them_and_rewards_are_called(flags):
    """On an empty completion, and on the row's first text."""
    fields = flags(QWEN_05B)
    printed, _ = dry_run(train_grpo, **fields, gpus="1x24")
    assert f"data.jsonl:2, 20 tokens: '{'2' * 20}'" in printed
    assert "mean_digit: '' gets 0.0, '1234' gets 2.0" in printed
    Path(fields["data"]).write_text(json.dumps({"prompt": "1", "answer": "\ud800"}))
    assert "'?' gets 0.5" in dry_run(train_grpo, **fields, gpus="1x24")[0]
    broken = (fields["reward"][0].replace("mean_digit", "broken"),)
    with pytest.raises(RewardError, match="broken"):
        dry_run(train_grpo, **{**fields, "reward": broken}, gpus="1x24")


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
    printed, code = dry_run(module, dry_run=True, device="cpu")
    assert code == 0
    assert "592,768 parameters, float32 on 1 x cpu" in printed
    assert "--max-tokens-per-microbatch 8192 --recompute-layers off" in printed
    assert not (tmp_path / "runs").exists()


def test_a_script_that_lacks_the_call_trains_nothing():
    """A copy of an older script takes the flag too."""
    with pytest.raises(InputError, match="--dry-run: this script lacks"):
        Setup(RunConfig(dry_run=True), name="old")


def test_a_resumed_run_sums_gradients_as_it_began_to(one_rank, runs):
    """Microbatches and sharding, whatever memory there is now: otherwise sums would round differently."""
    flags = f"{TINY} --run-name sizes"
    output = run_in_pool(one_rank, "train_grpo.py", flags, runs=runs)
    assert output.count("sizes --max-running-requests 256 --cache-tokens 65536") == 1
    path: Path = runs / "sizes" / "args.json"
    args = json.loads(path.read_text())
    assert args["max_tokens_per_microbatch"] == 8192
    assert args["flags"]["max_tokens_per_microbatch"] == "auto"
    assert args["shard_gradients"] is False
    path.write_text(json.dumps({**args, "max_tokens_per_microbatch": 40, "shard_gradients": True}))
    output = run_in_pool(one_rank, "train_grpo.py", flags, "--num-steps 2", runs=runs)
    assert "--max-tokens-per-microbatch 40 " in output
    assert "--shard-gradients on" in output
    assert json.loads(path.read_text())["max_tokens_per_microbatch"] == 40


def on_a_full_machine():
    """A patch under which a run finds a megabyte free."""
    return mock.patch.object(setup, "free_bytes", return_value=1e6)


def test_row_38_a_run_that_cannot_fit_is_refused_before_models_are_loaded(one_rank, runs):
    """And leaves only its lock. With all sizes given it starts: they may be known better."""
    how = {"runs": runs, "under": on_a_full_machine}
    with pytest.raises(AssertionError, match=r"InputError: the models need .* 0.9 MB"):
        run_in_pool(one_rank, "train_grpo.py", TINY, "--run-name small", **how)
    assert [path.name for path in (runs / "small").iterdir()] == ["lock"]
    sizes = "--max-running-requests 4 --cache-tokens 512 --max-tokens-per-microbatch 99"
    switches = "--recompute-layers off --shard-gradients off"
    run_in_pool(one_rank, "train_grpo.py", TINY, sizes, switches, "--run-name given", **how)
