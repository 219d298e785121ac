"""The shape of the code: which module may import which, how long files get, what the help and the README say."""

import ast
import dataclasses
import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "errors": 0,
    "reward_worker": 0,
    "durable": 0,
    "tensor_files": 0,
    "watch": 0,
    "distributed": 0,
    "flags": 0,
    "numerics": 0,
    "portable": 0,
    "paged": 0,
    "attention": 0,
    "kv_cache": 0,
    "sampling": 0,
    "losses": 0,
    "plan": 1,
    "batch": 1,
    "advantages": 1,
    "model": 1,
    "weights": 2,
    "parallel": 2,
    "scoring": 2,
    "rows": 2,
    "graphs": 3,
    "engine": 3,
    "reward_process": 4,
    "rewards": 4,
    "tasks": 4,
    "tasks.load": 4,
    "tasks.gsm8k": 4,
    "tasks.jsonl": 4,
    "tasks.sorting": 4,
    "data": 4,
    "runs": 4,
    "checkpoint": 4,
    "metrics": 4,
    "logger": 4,
    "toy": 5,
}
HEAVY = ("transformers", "wandb", "flash_attn", "torch.distributed.fsdp", "huggingface_hub", "tokenizers")


def module_name(path):
    """The name within the package; "" is the package itself."""
    parts = path.relative_to(ROOT / "minirl").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


SCRIPTS = [ROOT / "train_grpo.py", ROOT / "train_ppo.py"]
FILES = {module_name(path): path for path in sorted((ROOT / "minirl").rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imported_names(node):
    """Everything that an import statement may load, as absolute dotted names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative import"
        return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def imported_modules(tree):
    """Modules of the package that a tree imports, also inside its functions."""
    names = {name for node in ast.walk(tree) for name in imported_names(node)}
    ours = {name.removeprefix("minirl.") for name in names if name.startswith("minirl.")}
    return ours & LAYERS.keys()


def statements_at_import(tree):
    """Nodes that run when the module is imported: all but those in functions."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def docstrings(tree):
    """The constants of a tree that are docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            yield node.body[0].value


def test_every_module_has_a_layer():
    """No file is outside the table, and none of the table is gone."""
    assert FILES.keys() - {""} == LAYERS.keys()
    assert imported_modules(TREES[""]) == set()


@pytest.mark.parametrize("name", LAYERS)
def test_no_module_imports_a_higher_layer(name):
    """Also inside functions; the library never imports a script, a test or a benchmark."""
    higher = {other for other in imported_modules(TREES[name]) if LAYERS[other] > LAYERS[name]}
    assert not higher, f"{name} (layer {LAYERS[name]}) imports {higher}"
    outside = {path.stem for path in ROOT.glob("*.py")} | {"tests", "benchmarks"}
    roots = {found.split(".")[0] for node in ast.walk(TREES[name]) for found in imported_names(node)}
    assert not roots & outside


def test_imports_have_no_cycle():
    """Within a layer too: the modules can be put in an order where each imports only earlier ones."""
    left = {name: imported_modules(tree) - {name} for name, tree in TREES.items() if name}
    assert sum(map(len, left.values())) > len(left), "the parser found hardly any import"
    while ready := [name for name, imports in left.items() if not imports & left.keys()]:
        left = {name: imports for name, imports in left.items() if name not in ready}
    assert not left, f"import cycle among {sorted(left)}"


@pytest.mark.parametrize("name", FILES)
def test_heavy_packages_are_imported_where_they_are_used(name):
    """Importing the library loads no tokenizer, no tracker, no hub, no kernels and no FSDP."""
    found = [
        imported
        for node in statements_at_import(TREES[name])
        for imported in imported_names(node)
        if any(imported == heavy or imported.startswith(f"{heavy}.") for heavy in HEAVY)
    ]
    assert not found


@pytest.mark.parametrize("name", FILES)
def test_no_padding_and_no_attention_mask(name):
    """No identifier and no text of the code speaks of pad tokens or attention masks; config.json's keys may."""
    tree = TREES[name]
    exempt = {id(constant) for constant in docstrings(tree)}
    # Where transformers' classifiers read their score depends on it, also for one sequence.
    if name == "rewards":
        exempt |= {id(node) for node in ast.walk(tree) if getattr(node, "value", None) == "pad_token_id"}
    for node in tree.body:
        if name == "weights" and isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HARMLESS_KEYS":
            exempt |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) not in exempt:
            words = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value")]
            said = [w for w in words if isinstance(w, str) and re.search("pad_token|attention_mask", w)]
            assert not said, f"{name}, line {getattr(node, 'lineno', '?')}: {said}"


@pytest.mark.parametrize("path", [*FILES.values(), *SCRIPTS], ids=lambda path: path.name)
def test_no_file_is_too_long(path):
    """A reader holds a file in their head: 300 lines, and 380 for a script, whose options take a page."""
    assert len(path.read_text().splitlines()) <= (380 if path in SCRIPTS else 300)


def test_the_library_stays_under_5800_lines():
    """A reader finishes it in an afternoon."""
    assert sum(len(path.read_text().splitlines()) for path in FILES.values()) < 5800


@pytest.mark.parametrize("name", FILES)
def test_no_function_is_longer_than_50_lines(name):
    """Only a script's main, which is the algorithm, may be."""
    functions = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.FunctionDef)]
    long = {node.name: node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno - node.lineno >= 50}
    assert not long


def test_the_readme_maps_the_modules_that_exist():
    """Each module of the package and each script once, and nothing that is gone."""
    if not (ROOT / "README.md").exists():
        pytest.skip("no README.md yet")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    tree = max(blocks, key=lambda block: len(re.findall(r"\w+\.py\b", block)))
    listed = re.findall(r"^[\s|`│├└─]*([\w/]+\.py)\b", tree, re.MULTILINE)
    exist = [str(path.relative_to(ROOT)) for path in (*FILES.values(), *ROOT.glob("train_*.py"))]
    assert sorted(listed) == sorted(path for path in exist if not path.endswith("__init__.py"))


def run_script(script, *arguments):
    """The script on the command line; it must end before it makes anything."""
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={"COLUMNS": "200", "PATH": "/usr/bin"}, timeout=60
    )


def help_by_flag(script):
    """Flag to description, without its default, as --help prints them."""
    done = run_script(script, "--help")
    assert done.returncode == 0, done.stderr
    found, flag = {}, ""
    for line in done.stdout.splitlines():
        text = line.strip("│ \n")
        if line.startswith("│") and text.startswith("-"):
            flags, _, text = text.partition("  ")
            flag = [word for word in re.split(r"[ ,]+", flags) if word.startswith("--")][-1]
            if flag.startswith("--no-"):
                flag = flag.replace("--no-", "--", 1)
        if line.startswith("│") and flag:
            found[flag] = f"{found.get(flag, '')} {text.strip()}".strip()
    return {flag: re.sub(r"\(default: [^()]*\)$", "", text).strip() for flag, text in found.items()}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_describes_every_field(script):
    """Each field of Config has a flag, and each flag says what it does."""
    config = runpy.run_path(str(script), run_name="imported")["Config"]
    flags, described = (
        {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(config)},
        help_by_flag(script),
    )
    assert flags == described.keys() - {"--help"}
    assert described["--kl-reward-coef"].startswith("weight of the KL term")
    assert described["--chat"].startswith("wrap text prompts")
    assert [flag for flag, text in described.items() if len(text) < 5] == []


def test_a_misspelt_flag_is_refused_with_the_right_one():
    """Nothing runs, the exit status says so, and the message has the flag that was meant."""
    done = run_script(SCRIPTS[0], "--grop-size", "4")
    assert done.returncode not in (0, 1)
    assert "--group-size" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_benchmarks_import_only_what_the_library_has(path):
    """They run by hand: a name that moved would be noticed late."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minirl"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}"), (
                    alias.name
                )
