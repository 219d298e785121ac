"""The code's structure: the import order of folders, late imports, and the help of flags."""

import ast
import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys

import pytest

import train_grpo
import train_ppo
from minirl.run.flags import flag_name, parse
from support.jobs import ROOT

# Bottom up: a folder, or a module next to the folders, imports only from earlier entries.
ORDER = (
    "errors rollouts files ranks model generation training data rewards report episodes run extras"
).split()
# Optional parts: other code imports extras only inside functions.
EXTRAS = sorted(
    path.stem
    for path in (ROOT / "minirl" / "extras").iterdir()
    if path.stem not in ("__init__", "__pycache__")
)
TINY = "--num-steps 1 --prompts-per-step 4 --group-size 4 --save-every 1"
HEAVY = (
    "datasets flash_attn huggingface_hub matplotlib pyarrow tokenizers torch.distributed.fsdp transformers wandb"
).split()


def module_name(path):
    """Return a module's name within the package; "" is the package itself."""
    parts = path.relative_to(ROOT / "minirl").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {module_name(path): path for path in sorted((ROOT / "minirl").rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imported_names(node):
    """Return everything that an import statement may load, as absolute dotted names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative import"
        return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def imported_modules(nodes):
    """Return the package's modules that these nodes import. A tree counts as all its nodes, even inside functions."""
    nodes = ast.walk(nodes) if isinstance(nodes, ast.AST) else nodes
    names = {name for node in nodes for name in imported_names(node)}
    return {name.removeprefix("minirl.") for name in names if name.startswith("minirl.")} & FILES.keys()


def folder_of(name):
    """Return a module's folder, or the module itself if it is next to the folders."""
    return name.partition(".")[0]


def statements_at_import(tree):
    """Yield the nodes that run when a module is imported: all but code in functions and under TYPE_CHECKING."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        is_for_checker = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not is_for_checker and not is_function:
            waiting.extend(ast.iter_child_nodes(node))


def test_no_module_imports_a_higher_folder():
    """This holds inside functions too, except for extras. A new folder needs a place in ORDER.

    The library never imports a script, a test or a benchmark.
    """
    outside = {path.stem for path in ROOT.glob("*.py")} | {"tests", "benchmarks"}
    for name in filter(None, FILES):
        height = ORDER.index(folder_of(name))
        higher = {other for other in imported_modules(TREES[name]) if ORDER.index(folder_of(other)) > height}
        early = imported_modules(statements_at_import(TREES[name]))
        wrong = {other for other in higher if other in early or folder_of(other) != "extras"}
        assert not wrong, f"{name} imports {wrong}"
        roots = {found.split(".")[0] for node in ast.walk(TREES[name]) for found in imported_names(node)}
        assert not roots & outside, name


def test_only_tests_that_bear_an_extras_name_need_it():
    """This covers imports at module level, in tests/support too. Inside functions, a core test may use an extra."""
    for path in (ROOT / "tests").rglob("*.py"):
        nodes = statements_at_import(ast.parse(path.read_text()))
        names = {name for node in nodes for name in imported_names(node)}
        needed = {name.split(".")[2] for name in names if name.startswith("minirl.extras.")}
        assert not [extra for extra in needed if not path.name.startswith(f"test_{extra}")], path.name


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_without_an_extra_the_rest_trains(extra, tmp_path):
    """The default run works in a copy without the extra."""
    ignored = shutil.ignore_patterns("__pycache__", extra, f"{extra}.py")
    shutil.copytree(ROOT / "minirl", tmp_path / "minirl", ignore=ignored)
    shutil.copy(ROOT / "train_grpo.py", tmp_path)
    assert not list((tmp_path / "minirl" / "extras").glob(f"{extra}*"))
    environment = os.environ | {"MINIRL_RUNS": str(tmp_path / "runs")}
    command = [sys.executable, "train_grpo.py", *TINY.split()]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)


def test_the_logger_needs_little_of_the_library():
    """Shared data types are in low folders: logging a step imports neither the engine nor the model."""
    waiting, needed = ["report.logger"], set()
    while waiting:
        name = waiting.pop()
        found = imported_modules(TREES[name]) - needed
        needed |= found
        waiting.extend(found)
    folders = {folder_of(name) for name in needed}
    assert not folders & {"model", "generation", "training", "run"}, sorted(needed)


def test_imports_have_no_cycle():
    """All modules, even within one folder, have an order in which each imports only earlier modules."""
    left = {name: imported_modules(tree) - {name} for name, tree in TREES.items() if name}
    assert sum(map(len, left.values())) > len(left), "the parser found hardly any import"
    assert imported_modules(TREES[""]) == set()
    while ready := [name for name, imports in left.items() if not imports & left.keys()]:
        left = {name: imports for name, imports in left.items() if name not in ready}
    assert not left, f"import cycle among {sorted(left)}"


def test_heavy_packages_are_imported_where_they_are_used():
    """Importing the library loads no tokenizers, trackers, Hub client, kernels or FSDP."""
    for name in FILES:
        found = [
            imported
            for node in statements_at_import(TREES[name])
            for imported in imported_names(node)
            if any(imported == heavy or imported.startswith(f"{heavy}.") for heavy in HEAVY)
        ]
        assert not found, f"{name} imports {found}"


def test_no_padding_and_no_attention_mask():
    """No identifier or key in the code mentions pad tokens or attention masks."""
    for name in FILES:
        # transformers' classifiers need the pad token to find the score's position, even for one sequence.
        exempt = {"pad_token_id"} if name == "rewards.reward_model" else set()
        for node in ast.walk(TREES[name]):
            words = {getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value")} - exempt
            said = [w for w in words if re.fullmatch(r"\S*(pad_token|attention_mask)\S*", str(w))]
            assert not said, f"{name}, line {getattr(node, 'lineno', '?')}: {said}"


@pytest.mark.parametrize("config", [train_grpo.Config, train_ppo.Config], ids=["grpo", "ppo"])
def test_help_describes_every_field(config, monkeypatch, capsys):
    """Each field of Config has a flag, and each flag's help comes before its default."""
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit):
        parse(config, description="", arguments=["--help"])
    rows = re.split(r"\n\W (?=--\w)", capsys.readouterr().out)[1:]
    described = {}
    for usage, _, text in (row.partition("  ") for row in rows):
        described |= dict.fromkeys(re.findall("--[a-z-]+", usage), text.strip("│ \n"))
    assert {flag_name(field.name) for field in dataclasses.fields(config)} <= described.keys()
    assert [flag for flag, text in described.items() if not re.match(r"\w[^(]{4}", text)] == []


def test_a_misspelt_flag_is_refused_with_the_right_one(capsys):
    """The exit status is 2, and the message suggests the intended flag. Fault 43."""
    with pytest.raises(SystemExit) as end:
        parse(train_grpo.Config, description="", arguments=["--grop-size", "4"])
    assert end.value.code == 2
    assert "--group-size" in capsys.readouterr().err


def test_no_file_is_read_that_could_run_code():
    """torch.load always gets `weights_only`, and no other code unpickles (torch itself gathers objects). Fault 35."""
    for name in FILES:
        for node in ast.walk(TREES[name]):
            assert not {"pickle", "marshal", "shelve", "joblib", "dill"} & set(imported_names(node)), name
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in map(ast.unparse, node.keywords), name


def test_no_test_file_imports_another():
    """Code that several test files need is in tests/support."""
    for path in (ROOT / "tests").rglob("*.py"):
        imported = {name for node in ast.walk(ast.parse(path.read_text())) for name in imported_names(node)}
        assert not [name for name in imported if name.startswith(("test_", "tests."))], path


def test_benchmarks_import_only_what_the_library_has():
    """Benchmarks run by hand, so a renamed import would go unnoticed. test_gpu_check.py runs imports in functions."""
    for path in (ROOT / "benchmarks").glob("*.py"):
        importlib.import_module(path.stem)
