"""The program that measures a GPU works before there is one, and hides no failure."""

import importlib
import subprocess
import sys

import pytest

from support.jobs import LIMIT_S, ROOT, wait_for
from support.models import RAW_CONFIG, make_folder
from support.texts import TOKENS, save_tokenizer

# One check of each function; the others run the same ones with the other script.
CHECKS_OF_THE_CPU = "environment gpu_tests first_command ppo grpo_1_5b kill_and_resume waits compiled speed"


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_check")


@pytest.mark.parametrize(
    ("figures", "is_good"),
    [({"of_microbatch": 2, "x": 0}, True), ({"of_microbatch": 3, "x": 0}, False), ({"x": 0}, False)],
    ids=["good", "outside", "missing"],
)
def test_only_figures_as_expected_are_a_success(gpu_check, figures, is_good, monkeypatch, capsys):
    """The exit code says so, and a figure outside is marked."""
    outcome = gpu_check.Outcome("waits", "ok", 1.0, figures)
    monkeypatch.setattr(gpu_check, "run_alone", lambda *_: outcome)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--only", "waits"])
    assert gpu_check.main() == (0 if is_good else 1)
    printed = capsys.readouterr().out
    assert "| x | 0 |" in printed
    assert (" !" in printed) == (figures.get("of_microbatch") == 3)


@pytest.mark.parametrize(
    ("program", "limit_s", "status"),
    [("raise ValueError('broken')", LIMIT_S, "failed"), ("import time; time.sleep(60)", 0.1, "too slow")],
)
def test_a_check_that_fails_or_hangs_ends_and_says_why(
    gpu_check, program, limit_s, status, monkeypatch, tmp_path
):
    broken, has_begun = tmp_path / "broken.py", tmp_path / "begun"
    broken.write_text(f"print('begun', flush=True); open({str(has_begun)!r}, 'w'); {program}")

    class Popen(subprocess.Popen):
        def communicate(self, *args, **options):
            wait_for(has_begun.exists, "the program has not begun")
            return super().communicate(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(gpu_check, "__file__", str(broken))
    monkeypatch.setitem(gpu_check.CHECKS, "waits", gpu_check.Check(gpu_check.waits, limit_s))
    outcome = gpu_check.run_alone("waits", "cpu", tmp_path)
    assert outcome.status == status
    assert "begun" in outcome.error
    assert not gpu_check.is_good(outcome, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS_OF_THE_CPU.split())
def test_a_check_passes_on_the_cpu(gpu_check, name, runs):
    """Small, and without what only a device can show."""
    figures = gpu_check.CHECKS[name].run(gpu_check.Place("cpu", runs))
    outcome = gpu_check.Outcome(name, "ok", 0.0, figures)
    assert gpu_check.is_good(outcome, "cpu"), outcome


@pytest.mark.slow
def test_a_check_is_run_in_a_process_of_its_own(gpu_check, tmp_path):
    outcome = gpu_check.run_alone("waits", "cpu", tmp_path)
    assert gpu_check.is_good(outcome, "cpu"), outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "generate.py",
        "grpo_step.py --kl-coef 0.04",
        "learn.py --steps 10",
        "profile_step.py",
        "weight_sharing.py",
    ],
)
def test_a_benchmark_runs_on_a_small_model(command, tmp_path):
    """They call the library by hand, so that what changed there would be noticed late."""
    folder = make_folder(tmp_path / "model", RAW_CONFIG | {"vocab_size": len(TOKENS)})
    save_tokenizer(folder, None)
    script, *flags = command.split()
    program = [sys.executable, str(ROOT / "benchmarks" / script), str(folder), *flags]
    options = "--prompts 4 --samples 4 --max-new 16".split()
    done = subprocess.run([*program, *options], capture_output=True, text=True, check=False)
    assert "RESULT {" in done.stdout, done.stderr
