"""The GPU check works without a GPU and hides no failure."""

import signal
import subprocess
import sys

import gpu_check
import pytest
from workload import start_script

from support.interpreter import run_with_compiler
from support.jobs import LIMIT_S, ROOT, start, wait_for
from support.models import RAW_CONFIG, make_folder
from support.texts import TOKENS, save_tokenizer


@pytest.mark.parametrize(
    ("figures", "mark"),
    [({"of_microbatch": 2, "x": 0}, ""), ({"of_microbatch": 3, "x": 0}, " !"), ({"x": 0}, " !")],
    ids=["good", "outside", "missing"],
)
def test_only_figures_as_expected_are_a_success(figures, mark):
    """A figure outside its range is marked."""
    rows, is_good = gpu_check.format_check("waits", "ok", figures)
    assert is_good == (not mark)
    assert "| x | 0 |" in rows
    assert f"{figures.get('of_microbatch', 'nan')}{mark} | 0 to 2" in rows


def test_a_group_of_checks_fits_into_ten_minutes():
    for group in gpu_check.GROUPS.values():
        assert (
            sum(check.limit_s for check in group.values()) < 600 - 20
        )  # 20 s to start, and to kill the last check


@pytest.mark.parametrize(
    ("program", "limit_s", "status"),
    [("raise ValueError('broken')", LIMIT_S, "failed"), ("import time; time.sleep(60)", 0.1, "too slow")],
)
def test_a_check_that_fails_or_hangs_ends_with_the_figures_that_it_has(
    program, limit_s, status, monkeypatch, tmp_path
):
    broken, has_begun = tmp_path / "broken.py", tmp_path / "begun"
    broken.write_text(f"print('FIGURES {{\"x\": 1}}', flush=True); open({str(has_begun)!r}, 'w'); {program}")

    class Popen(subprocess.Popen):
        def wait(self, *args, **options):
            wait_for(has_begun.exists, "the program has not begun")
            return super().wait(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr("gpu_check.__file__", str(broken))
    monkeypatch.setitem(gpu_check.CHECKS, "waits", gpu_check.Check(limit_s, gpu_check.waits))
    found, figures = gpu_check.run_alone(gpu_check.Place("waits", "cpu", tmp_path))
    assert (found, figures["x"]) == (status, 1)
    assert not gpu_check.format_check("waits", found, figures)[1]


KILLED = """
import os, sys
sys.path.insert(0, {benchmarks!r})
import gpu_check
sys.argv = ["gpu_check", *"--device cpu --only waits compiled --output {output}".split()]
gpu_check.run_alone = lambda place: ("ok", {{"x": 1}}) if place.name == "waits" else os.kill(os.getpid(), 9)
gpu_check.main()
"""


def test_a_kill_loses_no_outcome_of_an_earlier_check(tmp_path):
    """Each outcome is printed and written to the file."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(benchmarks=str(ROOT / "benchmarks"), output=tmp_path))
    job = start(tmp_path, [[str(script)]])
    assert job.codes() == [-signal.SIGKILL]
    for text in (job.output(0), (tmp_path / "figures.md").read_text()):
        assert "| **waits** | ok |" in text
        assert "| x | 1 |" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    ["environment waits gpu_tests", "speed grpo_1_5b", "ppo kill_and_resume", "kernels_7b sweep compiled"],
)
def test_the_checks_pass_on_the_cpu(names, tmp_path):
    """The CPU runs one small check of each kind, without figures that need a device."""
    program = [sys.executable, gpu_check.__file__, "--device", "cpu", "--output", tmp_path]
    done = subprocess.run([*program, "--only", *names.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "figures.md").read_text().count("** | ok |") == len(names.split())


@pytest.mark.slow
def test_what_is_on_the_callers_pythonpath_is_found_in_every_process(monkeypatch, tmp_path):
    """PYTHONPATH may contain wheels that are not installed."""
    wheels, program = tmp_path / "wheels", tmp_path / "program.py"
    wheels.mkdir()
    (wheels / "of_a_wheel.py").touch()
    program.write_text("import minirl, of_a_wheel")
    monkeypatch.setenv("PYTHONPATH", str(wheels))
    assert start_script(str(program), runs=tmp_path, ranks=1).wait() == 0
    assert run_with_compiler(program).returncode == 0


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
    """Benchmarks call the library directly, so a change of the library would go unnoticed."""
    folder = make_folder(tmp_path / "model", RAW_CONFIG | {"vocab_size": len(TOKENS)})
    save_tokenizer(folder, None)
    script, *flags = f"{command} --prompts 4 --samples 4 --max-new 16".split()
    program = [sys.executable, ROOT / "benchmarks" / script, folder, *flags]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert "RESULT {" in done.stdout, done.stderr
