"""Docs match the code: metrics, exit codes, presets, flags and links. Code blocks run."""

import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train_grpo
import train_ppo
from minirl import errors
from minirl.episodes.episode import Episode
from minirl.rewards.functions import EpisodeReward
from minirl.run.config import RunConfig
from minirl.run.flags import flag_name
from minirl.run.inputs import load_rollout_function
from support.collecting import chat_prompts, make_collector
from support.forked import python_path
from support.marks import slow
from support.models import QWEN_1_5B, RAW_CONFIG, make_folder
from support.scripts import ROOT, read_metrics, trained, write_rows
from support.texts import TEMPLATE, TOKENS, assistant, save_tokenizer

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted((ROOT / "tests").glob("*.md")), ROOT / "AGENTS.md"]
TINY = "--num-steps 2 --prompts-per-step 4 --group-size 4"
RUNS = {
    "grpo": ("train_grpo.py", "--kl-coef 0.1"),
    "ppo": ("train_ppo.py", "--kl-reward-coef 0.1"),
}
REWARDS = """
def some(completions):
    return [None if len(c) % 2 else 1.0 for c in completions]
def few(completion_ids):
    return [None if len(ids) % 2 else -float(len(ids)) for ids in completion_ids]
"""

# This program stands in for an agent in another language.
PROGRAM = """
import json, os, sys, urllib.request
body = {"model": "any", "messages": [{"role": "user", "content": sys.stdin.read()}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def table(name):
    """Return the rows of all tables on a page, as lists of cells."""
    rows = [
        line.strip("|").split("|") for line in (DOCS / name).read_text().splitlines() if line.startswith("|")
    ]
    return [[cell.strip() for cell in row] for row in rows if not row[0].startswith("---")]


@pytest.mark.parametrize("name", ["grpo", slow("ppo")])
def test_every_metric_of_a_run_is_documented(one_rank, runs, tmp_path, name):
    """The runs have KL terms, several rewards that do not always apply, and an evaluation."""
    (tmp_path / "mine.py").write_text(REWARDS)
    script, flags = RUNS[name]
    rewards = f"--reward {tmp_path}/mine.py:some {tmp_path}/mine.py:few"
    lines = read_metrics(trained(one_rank, runs / name, script, TINY, flags, rewards))
    entries = re.findall(r"^- ((?:`.*?`,?\s+)*`.*?`):", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    documented = {metric for entry in entries for metric in re.findall(r"`([a-z]+/[\w<>/]+)`", entry)}
    forms = ("reward/{}", "reward/{}/std", "eval/{}")
    own = {form.format(function) for form in forms for function in ("some", "few", "exact")}
    for line in lines:
        assert None not in line.values()
        assert line.keys() - {"step"} - own <= documented
        assert 0 <= line.get("reward/not_applicable", 0) <= 1


def test_every_exit_code_is_documented():
    """The table lists exit code 1 and the codes of all errors that end a run on purpose."""
    classes = [error for _, error in inspect.getmembers(errors, inspect.isclass)]
    codes = {error.exit_code for error in classes if hasattr(error, "exit_code")}
    documented = {int(code) for row in table("operation.md") for code in re.findall(r"^\d+$", row[0])}
    assert documented == codes | {1}


def test_the_table_of_algorithms_has_the_presets_and_what_they_set():
    """The table has every preset, with all of its flags and values."""
    rows = {row[0].strip("`"): row[2] for row in table("algorithms.md")[1:]}
    assert list(rows) == list(train_grpo.ALGORITHMS)
    for name, preset in train_grpo.ALGORITHMS.items():
        if name == "default":
            continue
        flags = dict(re.findall(r"(--[\w-]+)(?: ([^\s`-][^\s`]*))?", rows[name]))
        assert flags.keys() == {flag_name(field) for field in preset}
        for field, value in preset.items():
            text = flags[flag_name(field)]
            assert text == ("" if value is True else text)
            assert value is True or type(value)(text) == value


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_flag_that_a_page_names_exists(page):
    """Flags belong to the scripts, torchrun, pytest, ruff or the commands that show a run."""
    fields = {**train_grpo.Config.__dataclass_fields__, **train_ppo.Config.__dataclass_fields__}
    known = set(map(flag_name, fields)) | {"--samples", "--top-k", "--top-p"}
    known |= {*"--standalone --nproc-per-node --nnodes --signals-to-handle --max-restarts".split()}
    known |= {
        *"--rdzv-backend --rdzv-endpoint --output --metrics --num --best --worst --help --check".split()
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", page.read_text()))
    assert {flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag for flag in named} <= known


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda path: path.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_map_has_every_folder_and_module_of_the_library_and_no_file_that_is_gone():
    """The map lists the modules at the top of the package. README and AGENTS name only files that exist."""
    text = (ROOT / "README.md").read_text()
    (shown,) = re.findall(r"## Map\n.*?```\n(.*?)```", text, re.DOTALL)
    folders = {f"minirl/{path.parent.name}/" for path in (ROOT / "minirl").glob("*/__init__.py")}
    modules = {f"minirl/{path.name}" for path in (ROOT / "minirl").glob("[a-z]*.py")}
    assert set(re.findall(r"minirl/\w+(?:/|\.py)", shown)) == folders | modules
    text += (ROOT / "AGENTS.md").read_text()
    files = re.findall(r"\b(?:(?:minirl|benchmarks|tests)/[\w/]+|train_\w+)\.py\b", text)
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_the_loop_that_the_readme_shows_is_the_script_s():
    """The README abridges the loop: each shown line is in `main`, in the same order."""
    (shown,) = re.findall(r"```python\n(for step .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = iter(inspect.getsource(train_grpo.main).splitlines())
    missing = [line for line in shown.splitlines() if f"    {line}" not in lines]
    assert missing == []


def test_the_phases_that_a_page_names_are_those_of_the_scripts():
    """docs/operation.md shows the report of a hang, which names a phase."""
    phases = set(re.findall(r'metrics\.begin\("(\w+)"\)', inspect.getsource(train_grpo)))
    named = re.findall(r"step \d+, phase (\w+)", (DOCS / "operation.md").read_text())
    assert named
    assert set(named) <= phases


def python_blocks(name):
    """Return a page's Python blocks."""
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def block_with(text, page):
    """Return the only block of a page that contains this text."""
    (source,) = (block for block in python_blocks(page) if text in block)
    return source


def names_of(text, page):
    """Run the page's block that contains this text; return the names that it defines."""
    names = {}
    exec(block_with(text, page), names)
    return names


def test_the_notebook_of_a_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_tokenizer(make_folder(tmp_path / "model", RAW_CONFIG | {"vocab_size": len(TOKENS)}), None)
    names_of("collector.collect", "examples/README.md")
    assert len(capsys.readouterr().out.splitlines()) == 2 * 4


def rollouts_of(rollout, rewards):
    """Return twelve rollouts of a chat."""
    collector = make_collector(chat_prompts(200), functions=rewards or None, rollout=rollout)
    return collector.collect(4).rollouts


ROLLOUTS = [block for block in python_blocks("episodes.md") if "def rollout" in block]


@pytest.mark.parametrize("source", ROLLOUTS, ids=range(len(ROLLOUTS)))
def test_the_rollouts_of_a_page_run(monkeypatch, source):
    """No message of the chat can be parsed."""
    parsed = assistant("", parse_error="no end")
    monkeypatch.setattr("minirl.data.answers.parse_assistant_message", lambda tokenizer, ids, before: parsed)
    names = {
        "Episode": Episode,
        "look_up": str.upper,
        "reply_to": str.upper,
        "is_right": bool,
    }
    exec(re.sub("</?query>", "e", source), names)
    rewards = {name: EpisodeReward(name) for name in ("answer", "format") if "return {" in source}
    rollouts = rollouts_of(names["rollout"], rewards)
    assert len(rollouts) == 4 * 3
    assert any(len(r.episode.turns) > 1 for r in rollouts) == ("turn = await" in source)


def test_a_reward_of_groups_on_a_page_runs():
    shorter = names_of("def shorter", "episodes.md")["shorter"]
    assert shorter([{"text": text} for text in ("abc", "a", "ab")]) == [0.0, 2.0, 1.0]


@pytest.fixture
def load(tmp_path):
    """Return a function that loads a page's block with this line, preceded by the code `before`."""

    def load_block(line, name, before="", kind="rollout"):
        file = tmp_path / f"{name}.py"
        file.write_text(before + block_with(line, "environments.md"))
        return load_rollout_function(RunConfig(**{kind: f"{file}:{name}"}))

    return load_block


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "name", "package"),
    [("import openai", "agent", "openai"), ("run_program(", "agent", "json")],
)
def test_the_agents_of_a_page_get_their_answers_and_are_rewarded(load, tmp_path, line, name, package):
    """A Python program named node comes first on the path."""
    pytest.importorskip(package)
    program = tmp_path / "node"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}")
    program.chmod(0o755)
    before = f"import os\nos.environ['PATH'] = {str(tmp_path)!r} + os.pathsep + os.environ['PATH']\n"
    rollouts = rollouts_of(load(line, name, before).function, {"reward": EpisodeReward()})
    assert {len(rollout.episode.turns) for rollout in rollouts} == {1}
    assert {rollout.episode.rewards["reward"] for rollout in rollouts} <= {0.0, 1.0}


@pytest.mark.slow
def test_the_environment_of_a_page_is_what_it_says(load, tmp_path):
    (tool,) = load("class Guess", "Guess", kind="environment").tools
    assert tool["function"]["name"] == "guess"
    game = runpy.run_path(str(tmp_path / "Guess.py"))["Guess"]()
    assert game.reset(target=7, prompt=[]).strip()
    assert [game.guess(3), game.guess(9), game.get_reward()] == ["higher", "lower", 0.0]
    assert [game.guess(7), game.get_reward()] == ["right", 1.0]


FIRST_HOUR = (DOCS / "first_hour.md").read_text()


def write_block(folder, source):
    """Append a block to the file that its first line names; in a script, insert the block before the main guard."""
    file = folder / source.split()[1]
    head, guard, tail = (file.read_text() if file.exists() else "").partition("if __name__")
    file.write_text(head + source + guard + tail)


@pytest.mark.slow
def test_every_command_of_the_first_hour_runs(tmp_path):
    """Commands run in order; training runs take two steps. A folder without weights and a file replace the Hub."""
    shutil.copy(ROOT / "train_grpo.py", tmp_path)
    model = tmp_path / "Qwen" / "Qwen2.5-1.5B-Instruct"
    save_tokenizer(model, TEMPLATE)
    (model / "config.json").write_text(json.dumps(QWEN_1_5B))
    write_rows(tmp_path / "rows.jsonl", [{"question": "one and one", "answer": "#### 2"}])
    page = re.sub(" --num-steps [0-9]+", "", FIRST_HOUR)
    page = re.sub(r"--nproc-per-node 2 \w+\.py", r"\g<0> --num-steps 2", page)
    page = page.replace("--task gsm8k", "--task gsm8k --data rows.jsonl --eval-data rows.jsonl")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"PYTHONPATH": python_path(), "PATH": path, "MINIRL_RUNS": "runs"}
    printed = ""
    for language, source in re.findall(r"```(bash|python)\n(.*?)```", page, re.DOTALL):
        if language == "python":
            write_block(tmp_path, source)
        else:
            command = ["bash", "-euo", "pipefail", "-c", source]
            printed += subprocess.check_output(command, cwd=tmp_path, env=variables, text=True)
    shown, first = (re.search("^step .*", text, re.MULTILINE)[0] for text in (page, printed))
    assert re.findall("[a-z]+", shown) == re.findall("[a-z]+", first)
    steps = {name: len(read_metrics(tmp_path / "runs" / name)) for name in ("default", "placed", "reinforce")}
    assert steps == {"default": 2, "placed": 2, "reinforce": 2}
    assert (tmp_path / "runs.png").exists()
