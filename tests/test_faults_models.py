"""Faults of model folders and of the bundled model: errors name the file, and nothing is guessed."""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.errors import InputError
from minirl.files import durable
from minirl.model.families import read_config
from minirl.model.transformer import Transformer
from minirl.model.weights import load_unsharded_model
from minirl.run import embedded_model
from support.jobs import LIMIT_S, ROOT
from support.models import RAW_CONFIG, make_folder


@pytest.fixture
def folder(tmp_path):
    """Make a folder with a tiny untied model, for the test to corrupt."""
    return make_folder(tmp_path / "model", RAW_CONFIG)


def load(folder):
    return load_unsharded_model(folder, dtype=torch.float32)


def test_row_32_non_finite_weights_are_named(folder):
    """Weights with a bit flip, or from a diverged run, must not be trained on."""
    path, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name][3] = torch.inf
    save_file(tensors, path)
    with pytest.raises(InputError, match=rf"model\.safetensors: {name} .*non-finite"):
        load(folder)


@pytest.mark.parametrize("length", [7, -1])
def test_row_33_a_truncated_download_is_named(folder, length):
    """The file ends in its header or in its data."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(
        InputError, match=r"model\.safetensors cannot be read as safetensors .*; fetch the file again"
    ):
        load(folder)


@pytest.mark.parametrize("file_name", ["a.safetensors", "gone.safetensors", None, 5, ["a.safetensors"], ""])
def test_row_33_every_file_in_the_index_must_exist(folder, file_name):
    """A single-file checkpoint takes precedence over the index, as in transformers."""
    path, index = folder / "model.safetensors", folder / INDEX
    name, *others = tensors = load_file(path)
    weight_map = {name: file_name, **dict.fromkeys(others, "a.safetensors")}
    index.write_text(json.dumps({"weight_map": weight_map}))
    load(folder)
    del tensors[name]
    save_file(tensors, folder / "a.safetensors")
    path.unlink()
    with pytest.raises(InputError, match=INDEX) as refused:
        load(folder)
    assert all(word in str(refused.value) for word in (name, str(file_name)))


def test_row_33_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path):
    """transformers would use the stored head."""
    folder = make_folder(tmp_path / "tied", RAW_CONFIG | {"tie_word_embeddings": True})
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(InputError, match=r"lm_head\.weight differs .* set it to false, or remove the tensor"):
        load(folder)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "cannot be read as JSON: .* line 1 column 2"),
        ("config.json", "[1]", r"expected a JSON object, got \[1\]"),
        (INDEX, "{}", "no weight_map found"),
    ],
)
def test_row_33_a_file_that_cannot_be_used_is_named_with_its_fault(folder, file, content, message):
    if file == INDEX:
        (folder / "model.safetensors").unlink()
    (folder / file).write_text(content)
    with pytest.raises(InputError, match=f"{file}: {message}"):
        load(folder)


def test_row_34_an_unavailable_hub_id_gives_one_line_within_seconds(tmp_path):
    """Without network (a closed loopback port) and cache, the error names the id, the flag and the Hub's reason."""
    script = "from minirl.model.folders import resolve_folder; resolve_folder('owner/missing')"
    nowhere = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", script]
    environment = os.environ | nowhere
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert "InputError: --model owner/missing: neither a local folder nor available from" in done.stderr


class Canary:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_row_35_pickles_are_refused_unread(folder, tmp_path):
    """The error for a folder with only pickled weights says how to convert them; nothing is unpickled."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    with pytest.raises(
        InputError,
        match=rf"{folder}: contains neither model\.safetensors nor {INDEX}; download one of them, or convert",
    ):
        load(folder)
    assert not (tmp_path / "canary").exists()


def test_row_35_remote_code_of_a_model_is_not_run(folder, tmp_path):
    """A config.json that requests remote code with auto_map is rejected by name."""
    (folder / "modeling_own.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    config = RAW_CONFIG | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="auto_map"):
        read_config(folder)
    assert not (tmp_path / "canary").exists()


def test_row_36_a_folder_without_a_tokenizer_is_named(folder):
    """Without a tokenizer, prompts cannot be encoded."""
    with pytest.raises(InputError, match=str(folder)):
        ChatTokenizer(folder)


@pytest.fixture
def quick_toy(monkeypatch):
    """Skip the bundled model's warm start; return the list of tasks for which a model was made."""
    monkeypatch.setattr(embedded_model, "rank", lambda: 0)
    monkeypatch.setattr(embedded_model, "barrier", lambda: None)
    monkeypatch.setattr(embedded_model, "print0", lambda *_: None)
    made = []

    def warm_start(task):
        made.append(task)
        return Transformer(embedded_model.config_from_dict(embedded_model.CONFIG))

    monkeypatch.setattr(embedded_model, "warm_start", warm_start)
    return made


def test_row_49_a_half_made_embedded_model_is_never_used(quick_toy, monkeypatch, tmp_path):
    """A process is killed just before the final rename, and the next run makes the model again."""
    if (pid := os.fork()) == 0:
        monkeypatch.setattr(durable, "publish", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        embedded_model.embedded_model_folder(tmp_path)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    (staging_folder,) = tmp_path.iterdir()
    assert staging_folder.name.startswith(".half-toy")
    folder = embedded_model.embedded_model_folder(tmp_path)
    assert len(quick_toy) == 1
    load(folder)
    assert embedded_model.embedded_model_folder(tmp_path) == folder
    assert len(quick_toy) == 1


def test_row_50_two_first_runs_at_once_make_one_embedded_model(quick_toy, monkeypatch, tmp_path):
    """The later run uses the earlier run's folder and leaves no files behind."""
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
