"""The program that measures a GPU works before there is one, and hides no failure."""

import importlib
import json
import subprocess
import sys

import pytest

from support.scripts import ROOT


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
def test_all_checks_pass_on_the_cpu(tmp_path):
    """Small, and without what only a device can show."""
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_check.py"),
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    outcomes = json.loads(out.read_text())
    assert [outcome["status"] for outcome in outcomes] == ["ok"] * 11
