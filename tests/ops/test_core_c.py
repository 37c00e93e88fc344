"""The C tests of tests/core, built with both sanitizers and run with a fresh seed (it is printed on failure)."""

import shutil
import subprocess
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1] / "core"
BUILT = Path(__file__).resolve().parents[2] / ".cache" / "built" / "core"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the C tests need gcc with its sanitizers")
def test_core():
    run = subprocess.run([CORE / "run.sh", BUILT], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    for name in ("test_packed", "test_cpu", "test_launch", "test_ops", "test_lora", "test_steps", "test_native"):
        assert f"{name}: ok" in run.stdout, run.stdout
