"""Rows from Parquet files and datasets: a folder in the Hub's layout loads like a Hub id."""

import datetime
import sys

import pyarrow.parquet
import pytest

from minirl.data.gsm8k import TEST_DATA, TRAIN_DATA
from minirl.data.jsonl import load_jsonl_task
from minirl.data.task import Row
from minirl.errors import InputError
from minirl.run.config import RunConfig
from minirl.run.inputs import load_task
from support.texts import assistant

CONFIGS = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
---
"""


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Change to a folder where openai/gsm8k is a dataset in the Hub's layout."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for split, number in (("train", "3"), ("test", "4")):
        rows = [{"question": f"{split}?", "answer": f"#### {number}"}]
        write_parquet(tmp_path / f"openai/gsm8k/data/{split}-00000-of-00001.parquet", rows)
    (tmp_path / "openai/gsm8k/README.md").write_text(CONFIGS)


def test_rows_of_a_parquet_file_are_python_values_without_the_keys_of_other_rows(tmp_path):
    """Covers messages, tools, nested and missing values, and a timestamp. The origin has the row's number.

    Arrow gives each object in a column the keys of all objects, with nulls.
    """
    path = str(tmp_path / "rows.parquet")
    columns = {
        "info": {"n": [1, None], "m": None},
        "score": 0.5,
        "when": datetime.datetime(2026, 1, 2),
        "none": None,
    }
    expected = []
    for number, name in enumerate("ab", 1):
        call = {"type": "function", "function": {"name": name, "arguments": {name: 1}}}
        chat = [assistant("x", tool_calls=[call])]
        parameters = {"type": "object", "properties": {name: {"type": "string"}}}
        tools = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
        expected.append(Row(chat, columns, f"{path} row {number}", tools))
    write_parquet(
        tmp_path / "rows.parquet", [{"prompt": r.prompt, "tools": r.tools, **columns} for r in expected]
    )
    assert load_jsonl_task(path, ()).train_rows == expected


def test_gsm8k_without_data_is_the_hubs(hub):
    """A run uses the train split, and the test split unless --eval-data names other data."""
    task = load_task(RunConfig(task="gsm8k"))
    assert [(row.origin, row.columns) for row in task.train_rows] == [
        (f"{TRAIN_DATA} row 1", {"answer": 3.0})
    ]
    assert [row.columns for row in task.eval_sets[TEST_DATA]] == [{"answer": 4.0}]
    assert [*load_task(RunConfig(task="gsm8k", eval_data=(TRAIN_DATA,))).eval_sets] == [TRAIN_DATA]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("openai/gsm8k:main", "has the splits train, test; choose one, such as openai/gsm8k:main:train"),
        ("openai/gsm8k:main:dev", "has the splits train, test"),
        ("openai/gsm8k:socratic:test", r"'socratic' not found. Available: \['main'\]"),
        ("openai/gsm8k:main:test", r" row 1: no field 'prompt' .* among \['answer', 'question'\]"),
        ("broken.parquet", "cannot be loaded; expected a file or a dataset"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_named_with_what_it_has(hub, tmp_path, source, said):
    """The error lists configs, splits or columns."""
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=f"^{source}.*{said}"):
        load_jsonl_task(source, ())


def test_without_datasets_the_error_says_what_to_install(hub, monkeypatch):
    """JSON needs no extra package, and the name of a missing file is not a Hub id."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        InputError, match=r"only JSON can be read; install the package with: pip install -e '\.\[data\]'"
    ):
        load_jsonl_task("openai/gsm8k", ())
    with pytest.raises(InputError, match=r"no file none\.parquet"):
        load_jsonl_task("none.parquet", ())
