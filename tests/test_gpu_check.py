"""The program that measures a GPU works before there is one, and hides no failure."""

import importlib
import json
import subprocess
import sys

import pytest

from support.jobs import ROOT, started


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_check")


def test_a_figure_outside_of_what_is_expected_is_marked_and_is_no_success(gpu_check):
    good = gpu_check.Outcome(
        "empty_microbatch", "ok", 1.0, {"parameters_without_gradient": 0, "largest_gradient": 0}
    )
    bad = gpu_check.Outcome(
        "empty_microbatch", "ok", 1.0, {"parameters_without_gradient": 0, "largest_gradient": 2}
    )
    missing = gpu_check.Outcome("empty_microbatch", "ok", 1.0, {"largest_gradient": 0})
    assert [gpu_check.is_good(outcome, "cuda") for outcome in (good, bad, missing)] == [True, False, False]
    table = gpu_check.table_of([good, bad], "cuda")
    assert table.count("| largest_gradient | 0 |") == 1
    assert table.count("| largest_gradient | 2 ! |") == 1


@pytest.mark.parametrize(
    ("program", "status"),
    [("raise ValueError('broken')", "failed"), ("import time; time.sleep(60)", "too slow")],
)
def test_a_check_that_fails_or_hangs_ends_and_says_why(gpu_check, program, status, monkeypatch, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text(f"print('begun', flush=True); {program}")
    monkeypatch.setattr(gpu_check, "__file__", str(broken))
    monkeypatch.setitem(gpu_check.CHECKS, "waits", gpu_check.Check(gpu_check.waits, 2))
    outcome = gpu_check.run_alone("waits", "cpu", tmp_path)
    assert outcome.status == status
    assert "begun" in outcome.error
    assert not gpu_check.is_good(outcome, "cpu")


@pytest.mark.slow
def test_all_checks_pass_on_the_cpu(gpu_check, runs, tmp_path):
    """Small, and without what only a device can show; each in a process of its own, as `run_alone` has it."""
    for name, check in gpu_check.CHECKS.items():
        (tmp_path / name).mkdir()
        command = [gpu_check.__file__, "--here", name, "--device", "cpu", "--folder", str(runs)]
        with started(tmp_path / name, [command]) as job:
            assert job.codes(within=check.limit_s) == [0], job.output(0)
            figures = json.loads(job.output(0).splitlines()[-1])
        outcome = gpu_check.Outcome(name, "ok", 0.0, figures)
        assert gpu_check.is_good(outcome, "cpu"), outcome


@pytest.mark.slow
def test_the_program_ends_with_0_and_writes_what_it_found(gpu_check, tmp_path):
    """For those checks that were asked for."""
    out = tmp_path / "out.json"
    command = [sys.executable, gpu_check.__file__, "--device", "cpu", "--only", "waits", "--out", str(out)]
    subprocess.run(command, check=True, timeout=600)
    (outcome,) = json.loads(out.read_text())
    assert (outcome["name"], outcome["status"]) == ("waits", "ok")
