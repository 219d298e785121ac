"""`--dry-run` prints a plan that can be checked by hand, writes nothing, and rejects runs that do not fit."""

import contextlib
import io
import json
import re
import shutil
from functools import partial
from unittest import mock

import pytest

import train_grpo
import train_ppo
from minirl.errors import InputError
from minirl.run.budget import Machine
from minirl.run.embedded_model import save_tokenizer
from minirl.run.setup import Setup
from support.models import QWEN_05B, QWEN_7B, QWEN_32B
from support.scripts import read_config, reward_of, run_in_pool, write_rows

TINY = "--num-steps 1 --prompts-per-step 4 --group-size 4 --save-every 1"
FLAGS_THAT_HELP = "--model.*--nproc-per-node.*--offload-optimizer.*--max-tokens-per-microbatch"


@pytest.fixture
def flags(tmp_path):
    """Return a function that makes flags for a config.json: a model folder, data with a long prompt, a reward."""

    def of_model(raw):
        save_tokenizer(tmp_path / "model")
        (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
        data = write_rows(tmp_path / "data.jsonl", [{"prompt": "1" * 300}, {"prompt": "2" * 20}])
        reward = reward_of(tmp_path, "float(len(c))")
        return f"--model {tmp_path}/model --data {data} {reward} --prompts-per-step 128 --max-new-tokens 512"

    return of_model


def dry_run(module, flags):
    """Return the script's output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert module.main(read_config(module, [flags, "--dry-run"])) == 0
    return printed.getvalue()


LARGE = "--max-new-tokens 4096 --offload-optimizer"
STALE = "--gpus 2x80 --prompts-per-step 16 --max-new-tokens 1024 --max-staleness 8"
# Numbers in GB, computed by hand. 7B: P = 7.6156e9, of which 2 x 152,064 x 3,584 are embedding and head.
CASES = {
    # The sizes are 2 P, 12 P / 8 and 4 P / 8. A rank decodes 128 completions, and a greedy completion for each of 16
    # prompts. A cached token takes 4 x 28 x 512 bytes, and a trained token keeps 28.4 x 171 kB, so the cache has no
    # room during an update.
    "7B on 8": (
        train_grpo,
        QWEN_7B,
        "--gpus 8x80 --kl-coef 0.1",
        {"weights": 15.2, "masters and moments": 11.4, "gradients": 3.81, "activations": 40.9}
        | {"cache_tokens": 144 * (812 + 128), "cache": 7.76},
        "recompute_layers False, shard_gradients True",
    ),
    # A token keeps 2 D bytes between layers and 1.4 x 171 kB within a layer; the head's gradients are bf16.
    "recomputed": (train_grpo, QWEN_7B, "--gpus 8x80 --recompute-layers on", {"activations": 4.7}, ""),
    # The embedding's and head's gradients, in bf16 and fp32, exceed the activations, which are freed by then.
    "sharded": (train_grpo, QWEN_7B, "--gpus 8x60 --recompute-layers on", {"activations": 6.54}, ""),
    # Gradient sums on the host would wait for each microbatch.
    "on the host": (
        train_grpo,
        QWEN_7B,
        "--gpus 2x70 --offload-optimizer",
        {"weights": 15.2, "gradients": 30.5},
        "recompute_layers True, shard_gradients False",
    ),
    # Full weights (65.5 GB) fit into no GPU; with shards, a rank holds embedding, head and an eighth of the layers.
    "32B from shards": (
        train_grpo,
        QWEN_32B,
        f"--gpus 8x80 {LARGE}",
        {"weights": 10.9},
        "shard_weights True",
    ),
    # The teacher is cut to the policy's vocabulary, by 2 x 128 rows.
    "a teacher": (train_grpo, QWEN_05B, "--gpus 1x80 --teacher {}/teacher", {"a frozen model": 15.2}, ""),
    # Both models have 0.494e9 parameters. With adapters (16 x 549,888 parameters), the critic shares the policy's base.
    "a critic": (train_ppo, QWEN_05B, "--gpus 1x80", {"weights": 1.98, "masters and moments": 11.9}, ""),
    "adapters": (
        train_ppo,
        QWEN_05B,
        "--gpus 1x80 --lora-rank 16",
        {"weights": 1.01, "gradients": 0.0704},
        "",
    ),
    # A rank has 8 prompts with 9 completions each, one of them greedy, and as many for the next step.
    "partial": (train_grpo, QWEN_05B, STALE, {"cache_tokens": 144 * (1324 + 128)}, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_equals_the_numbers_by_hand(flags, tmp_path, case):
    """The plan has at most ten lines and shows the first prompt as the model reads it."""
    module, raw, more, numbers, sizes = CASES[case]
    model = flags(raw)
    shutil.copytree(tmp_path / "model", tmp_path / "teacher")
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(QWEN_7B))
    printed = dry_run(module, f"{model} {more.format(tmp_path)}")
    assert len(printed.splitlines()) <= 10
    assert "2 prompts, the longest 300 tokens" in printed
    assert re.search(r"data.jsonl:\d: '(1{300}|2{20})'", printed)
    assert sizes in printed
    found = {name: float(re.search(rf"{name} ([\d.]+)", printed)[1]) for name in numbers}
    assert found == numbers


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        ("--gpus 1x6", f"does not fit into 6 GB per rank .*weights 0.988.*{FLAGS_THAT_HELP}"),
        ("--gpus 1x24 --cache-tokens 10000000", "--cache-tokens"),
        ("--reward math:none", "--reward math:none: math has no function none"),
        (
            "--gpus 1x6 --cache-tokens 8192 --max-tokens-per-microbatch 8192 --recompute-layers on",
            "--dry-run: the run does not fit",
        ),
        (
            "--gpus 1x80 --reward-model {}/judge",
            "--reward-model .*judge: has 800 positions, .* take 812 tokens",
        ),
    ],
)
def test_row_38_what_does_not_fit_is_refused_with_the_flags_to_change(flags, tmp_path, more, refusal):
    """Models, a given size, or a reward model's texts may not fit."""
    model = flags(QWEN_05B)
    shutil.copytree(tmp_path / "model", tmp_path / "judge")
    judge = {**QWEN_05B, "architectures": ["Qwen2ForSequenceClassification"], "max_position_embeddings": 800}
    (tmp_path / "judge" / "config.json").write_text(json.dumps({**judge, "id2label": {"0": "score"}}))
    with pytest.raises(InputError, match=refusal):
        dry_run(train_grpo, f"{model} {more.format(tmp_path)}")


def test_weights_of_another_model_are_refused(flags, embedded_model, tmp_path):
    """The error names missing tensors, as in a run."""
    more = flags(QWEN_05B)
    shutil.copy(embedded_model / "model.safetensors", tmp_path / "model")
    with pytest.raises(InputError, match="missing tensors"):
        dry_run(train_grpo, more)


def test_nothing_is_made(tmp_path, monkeypatch):
    """The bundled model is planned on this machine, whatever its memory."""
    monkeypatch.setenv("MINIRL_RUNS", str(tmp_path / "runs"))
    printed = dry_run(train_ppo, "")
    assert "592,768 parameters, torch.float32 on 1 x cpu" in printed
    assert "max_tokens_per_microbatch 8192, recompute_layers False" in printed
    with pytest.raises(InputError, match="must call print_plan"):  # in a fork without the call
        Setup(train_ppo.Config(dry_run=True), name="fork")
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_sums_gradients_as_it_began_to(one_rank, runs):
    """Microbatch size and sharding stay, whatever memory is free now; otherwise sums would round differently.

    The microbatch still grows to fit the longest sequence of the new flags. The wandb run continues.
    """
    flags = f"{TINY} --run-name sizes"
    run_in_pool(one_rank, "train_grpo.py", flags, runs=runs)
    path = runs / "sizes" / "args.json"
    args = json.loads(path.read_text())
    assert args["flags"]["max_tokens_per_microbatch"] == "auto"
    assert (args["max_tokens_per_microbatch"], args["shard_gradients"]) == (8192, False)
    path.write_text(json.dumps({**args, "max_tokens_per_microbatch": 40, "shard_gradients": True}))
    output = run_in_pool(one_rank, "train_grpo.py", flags, "--num-steps 2", runs=runs)
    assert "max_tokens_per_microbatch 40," in output
    assert "shard_gradients True" in output
    resumed = json.loads(path.read_text())
    assert (resumed["max_tokens_per_microbatch"], resumed["wandb_id"]) == (40, args["wandb_id"])
    output = run_in_pool(one_rank, "train_grpo.py", flags, "--num-steps 3 --max-new-tokens 50", runs=runs)
    assert "max_tokens_per_microbatch 59," in output  # the longest prompt has 9 tokens


def test_row_38_a_run_that_cannot_fit_is_refused_before_models_are_loaded(one_rank, runs):
    """With a free megabyte, a run leaves no folder. If flags give all sizes, the run starts: users may know better."""
    machine = Machine("cpu", num_ranks=1, free_bytes=1e6)
    how = {"runs": runs, "under": partial(mock.patch, "minirl.run.setup.this_machine", return_value=machine)}
    with pytest.raises(AssertionError, match=r"InputError: the run does not fit into 0.001 GB"):
        run_in_pool(one_rank, "train_grpo.py", TINY, "--run-name small", **how)
    assert not (runs / "small").exists()
    sizes = "--cache-tokens 512 --max-tokens-per-microbatch 99 --recompute-layers off"
    run_in_pool(one_rank, "train_grpo.py", TINY, sizes, "--run-name given", **how)
