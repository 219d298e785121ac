"""Faults of model folders, secrets, clocks and the embedded model: refused by name, never guessed."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minirl.data.tokenizer import Tokenizer
from minirl.errors import InputError
from minirl.files import durable, redaction
from minirl.model.families import read_config
from minirl.model.transformer import Transformer
from minirl.model.weights import load_replica, named_parameters, save_folder
from minirl.ranks import time_account
from minirl.report import logger
from minirl.report.logger import Logger
from minirl.run import embedded_model
from support.models import RAW_CONFIG, make_folder

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path):
    """A tiny untied model, to be spoilt."""
    return make_folder(tmp_path / "model", RAW_CONFIG)


def change_config(folder, **keys):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | keys))


def change_tensors(folder, change):
    """The folder with the dictionary of its tensors changed."""
    tensors = dict(named_parameters(load_replica(folder, dtype=torch.float32)))
    raw = json.loads((folder / "config.json").read_text())
    change(tensors)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    save_folder(folder, tensors, config=raw, tokenizer_from=None)


def load(folder):
    return load_replica(folder, dtype=torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_row_32_weights_that_are_not_finite_are_named(folder, value):
    """A bit flip or a diverged run must not be trained on."""
    change_tensors(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].data[3].fill_(value))
    with pytest.raises(
        InputError, match=r"model\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight .*not finite"
    ):
        load(folder)


def test_row_32_missing_weights_are_named(folder):
    """transformers would make up random ones."""
    change_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(InputError, match=r"missing tensors \['model\.norm\.weight'\]"):
        load(folder)


@pytest.mark.parametrize("length", [0, 7, 1000, -1])
def test_row_33_a_download_that_was_cut_off_is_named(folder, length):
    """Whether in the header or in the data."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(InputError, match=r"model\.safetensors: no whole safetensors file .*; fetch it again"):
        load(folder)


def test_row_33_an_index_that_promises_a_head_that_is_not_there_is_named(tmp_path):
    """Also of a tied head, which no parameter needs."""
    folder = make_folder(tmp_path / "tied", RAW_CONFIG | {"tie_word_embeddings": True})
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    weight_map = dict.fromkeys([*load_file(folder / "a.safetensors"), "lm_head.weight"], "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match=r"lacks tensors \['lm_head\.weight'\] that the index promises"):
        load(folder)


def test_row_33_a_tied_head_in_another_dtype_is_refused(tmp_path):
    """It differs from the embedding by its rounding at least, and is no reason for a traceback."""
    folder = make_folder(tmp_path / "tied", RAW_CONFIG | {"tie_word_embeddings": True})
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].bfloat16()
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"lm_head\.weight differs"):
        load(folder)


def test_row_33_a_shard_that_the_index_promises_is_named(folder):
    """The index is there, the file is not."""
    names = named_parameters(load(folder))
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match=r"model-00001-of-00001\.safetensors: no whole safetensors file"):
        load(folder)


def test_row_33_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path):
    """transformers would use the stored one; an equal one is merely redundant."""
    folder = make_folder(tmp_path / "tied", RAW_CONFIG | {"tie_word_embeddings": True})
    path = folder / "model.safetensors"
    tensors = load_file(path)
    expected = named_parameters(load(folder))
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    got = named_parameters(load(folder))
    assert all(torch.equal(got[name], weight) for name, weight in expected.items())
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(InputError, match=r"lm_head\.weight differs .* set it to false, or remove the tensor"):
        load(folder)


def test_a_single_file_wins_over_an_index_beside_it(folder):
    """As in transformers: what the index names is not even looked for. Fault 33."""
    expected = load(folder)
    index = {"weight_map": dict.fromkeys(named_parameters(expected), "old-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    got = named_parameters(load(folder))
    assert all(torch.equal(got[name], weight) for name, weight in named_parameters(expected).items())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", r"config\.json: not JSON: .* line 1, column 2"),
        ("config.json", "[1]", r"config\.json: expected a JSON object, got \[1\]"),
        ("config.json", "[" * 100_000, r"config\.json: cannot be read"),
        (
            "config.json",
            '{"vocab_size": 5, "vocab_size": 6}',
            r"config\.json: cannot be read: key 'vocab_size' is there twice",
        ),
        ("model.safetensors.index.json", "no", r"index\.json: not JSON"),
        ("model.safetensors.index.json", "{}", r"index\.json: has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', r"weight_map names 1; expected a file"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "../x"}}',
            r"weight_map names '\.\./x'; expected",
        ),
        ("model.safetensors.index.json", '{"weight_map": {"a": "/etc/x"}}', r"weight_map names '/etc/x'"),
    ],
)
def test_row_33_a_json_file_that_cannot_be_used_is_named_with_its_fault(folder, name, content, message):
    """No traceback, and no file outside of the folder is opened."""
    if name != "config.json":
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": None}, "'hidden_size' expected int, got NoneType"),
        ({"vocab_size": "33"}, "vocab_size='33'; expected a positive integer"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers=2.0; expected a positive integer"),
        ({"head_dim": True}, "head_dim=True; expected a positive integer"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0; expected a positive number"),
        ({"max_position_embeddings": None}, "'max_position_embeddings' expected int, got NoneType"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' expected bool, got str (value: 'no')"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 is no multiple of num_key_value_heads=2"),
    ],
)
def test_row_33_a_value_of_another_type_is_named(folder, keys, message):
    """Sizes, numbers and switches, before any tensor is read."""
    change_config(folder, **keys)
    with pytest.raises(InputError, match=re.escape(message)):
        load(folder)


def test_row_33_a_missing_size_is_named(folder):
    """Each that has no default."""
    config = json.loads((folder / "config.json").read_text())
    for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"):
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != key}))
        with pytest.raises(InputError, match=f"config.json: has no {key}"):
            load(folder)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vocab_size": 40}, r"shape \[33, 32\], the model's has \[40, 32\]"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
        ({"hidden_size": 64}, "shape"),
        ({"num_hidden_layers": 3}, r"missing tensors \['model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"unexpected tensors \['model\.layers\.1"),
    ],
    ids=["vocabulary", "tied", "hidden", "more layers", "fewer layers"],
)
def test_row_33_weights_that_do_not_fit_the_config_are_named(folder, keys, message):
    """Another vocabulary, width or number of layers, and a head of its own that config.json ties."""
    change_config(folder, **keys)
    with pytest.raises(InputError, match=message):
        load(folder)


def test_row_34_an_id_that_cannot_be_fetched_is_one_line_within_seconds(tmp_path):
    """No network (a closed loopback port), nothing in the cache: the id, the flag and the hub's reason."""
    script = "from minirl.model.weights import resolve_folder; resolve_folder('owner/missing')"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    began = time.monotonic()
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert time.monotonic() - began < 10
    assert (
        "InputError: --model owner/missing: neither a local folder nor available from the hub" in done.stderr
    )


class Canary:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_row_35_pickles_are_refused_unread(folder, tmp_path):
    """A folder with pickled weights only says how to convert; the pickle is not run."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    with pytest.raises(
        InputError, match=r"no model\.safetensors and no index; convert other formats to safetensors"
    ):
        load(folder)
    assert not (tmp_path / "canary").exists()


def test_row_35_code_that_comes_with_a_model_is_not_run(folder, tmp_path):
    """config.json asks for it by auto_map: refused by name."""
    (folder / "modeling_own.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_own.Model"})
    with pytest.raises(InputError, match="auto_map"):
        read_config(folder)
    assert not (tmp_path / "canary").exists()


def test_row_36_a_folder_without_a_tokenizer_is_named(folder):
    """The weights alone cannot be prompted."""
    with pytest.raises(InputError, match=str(folder)):
        Tokenizer(folder)


@pytest.fixture
def one_process(monkeypatch):
    """Rank 0 of 1."""
    monkeypatch.setattr(logger, "rank", lambda: 0)
    monkeypatch.setattr(logger, "world_size", lambda: 1)


def test_row_42_a_clock_that_jumps_changes_no_time(monkeypatch):
    """Durations come from the monotonic clock, whatever the wall clock does."""
    wall = iter([1e9, -1e9, 5e9, 0.0] * 100)
    monkeypatch.setattr(time, "time", lambda: next(wall))
    time_account.this_process.begin()
    for _ in range(3):
        with time_account.this_process.spent_on("decode"):
            time.sleep(0.001)
    elapsed, seconds = time_account.this_process.take()
    assert 0.003 <= seconds["decode"] <= elapsed < 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--model hf_abcdefghijklmnopqrstuvwxyz", "--model ***"),
        ("https://me:pa55word@host/data", "https://***@host/data"),
        ("sk-proj-0123456789abcdefXYZ", "***"),
        ("key=very-secret-value!", "key=***"),
        ("github_pat_11ABCDEFG0123456789_x glpat-abcdefghijklmnop_1234", "*** ***"),
        ("xoxb-123456789012-abcdefABCDEF AIzaSyA0123456789abcdefABCDEF_-012345", "*** ***"),
        ("Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVP-mB92K27", "Bearer ***"),
        ("hunter2, pa55 and Zugang!1, login-basic.", "***, *** and ***, ***."),
        ("hunter22, pa555, a passing pattern, the author's path: /usr/bin/true, false, 4096, basic", None),
        (
            "a flag like any other: hf_x, sk-1, /data/train.jsonl",
            "a flag like any other: hf_x, sk-1, /data/train.jsonl",
        ),
    ],
)
def test_row_48_secrets_are_taken_out_of_what_is_written(one_process, monkeypatch, tmp_path, text, expected):
    """Tokens by their form or from the environment, passwords in addresses; also deep in args.json and in wandb.

    None: a text without a secret, though with values of variables whose names are much like a secret's.
    """
    expected = text if expected is None else expected
    secrets = {"MY_API_KEY": "very-secret-value!", "DB_PASS": "hunter2", "PG_PASSWORD_2": "pa55"}
    secrets |= {"CI_PAT": "Zugang!1", "COMPOSER_AUTH": "login-basic"}
    others = {
        "PATTERN": "a passing pattern",
        "GIT_AUTHOR_NAME": "the author's path",
        "MY_PATH": "/usr/bin/true",
    }
    others |= {
        "TOKENIZERS_PARALLELISM": "false",
        "MAX_TOKENS": "4096",
        "AUTH_TYPE": "basic",
        "USE_KEY": "true",
    }
    for name, value in (secrets | others).items():
        monkeypatch.setenv(name, value)
    assert redaction.redacted(text) == expected
    started = []
    monkeypatch.setitem(
        sys.modules, "wandb", type("wandb", (), {"init": lambda **kwargs: started.append(kwargs)})
    )
    Logger(tmp_path, {"flags": {"data": text}, "command": ["x", text]}, wandb_mode="offline")
    args = json.loads((tmp_path / "args.json").read_text())
    assert args["flags"] == {"data": expected}
    assert args["command"] == ["x", expected]
    assert started[0]["config"]["command"] == ["x", expected]


@pytest.fixture
def quick_toy(monkeypatch):
    """The embedded model without its training."""
    monkeypatch.setattr(embedded_model, "rank", lambda: 0)
    monkeypatch.setattr(embedded_model, "barrier", lambda: None)
    monkeypatch.setattr(embedded_model, "print0", lambda *_: None)
    made = []

    def warm_start(task):
        made.append(task)
        return Transformer(embedded_model.config_from_dict(embedded_model.RECIPE["config"]))

    monkeypatch.setattr(embedded_model, "warm_start", warm_start)
    return made


def test_row_49_a_half_made_embedded_model_is_never_used(quick_toy, monkeypatch, tmp_path):
    """Killed when all is written but its name: the next run makes it anew."""
    if (pid := os.fork()) == 0:
        monkeypatch.setattr(durable, "publish", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        embedded_model.embedded_model_folder(tmp_path)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    (half_made,) = tmp_path.iterdir()
    assert half_made.name.startswith(".half-toy")
    folder = embedded_model.embedded_model_folder(tmp_path)
    assert len(quick_toy) == 1
    load(folder)
    assert embedded_model.embedded_model_folder(tmp_path) == folder
    assert len(quick_toy) == 1


@pytest.mark.parametrize("spoil", ["cut", "flip", "remove"])
def test_row_49_an_embedded_model_that_is_damaged_is_refused(quick_toy, tmp_path, spoil):
    """Any of its files, a single bit too: nothing trains on what nobody made."""
    folder = embedded_model.embedded_model_folder(tmp_path)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        middle = len(content) // 2
        if spoil == "cut":
            path.write_bytes(content[:middle])
        elif spoil == "flip":
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        else:
            path.unlink()
        with pytest.raises(
            InputError, match=f"embedded model is damaged .*: delete {folder}, and the next run makes it"
        ):
            embedded_model.embedded_model_folder(tmp_path)
        path.write_bytes(content)
    assert embedded_model.embedded_model_folder(tmp_path) == folder
    assert len(quick_toy) == 1


def test_row_50_two_first_runs_at_once_make_one_embedded_model(quick_toy, monkeypatch, tmp_path):
    """The one that is late takes the other's, and leaves nothing behind."""
    other = embedded_model.warm_start

    def while_another_is_made(task):
        monkeypatch.setattr(embedded_model, "warm_start", other)
        made = embedded_model.embedded_model_folder(tmp_path)
        (made / "of-the-other").touch()
        return other(task)

    monkeypatch.setattr(embedded_model, "warm_start", while_another_is_made)
    folder = embedded_model.embedded_model_folder(tmp_path)
    assert (folder / "of-the-other").exists()
    assert list(tmp_path.iterdir()) == [folder]
    load(folder)
