"""`python -m bitshard`: it says what is there, and also runs where the C core does not."""

import os
import pathlib
import shutil
import subprocess
import sys

import bitshard

PACKAGE = pathlib.Path(bitshard.__file__).parent


def report(folder: pathlib.Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "bitshard"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_sound_installation():
    ran = report(PACKAGE.parent)
    assert not ran.stderr and f"C core        {bitshard.__version__}" in ran.stdout
    assert f"usable: {', '.join(bitshard._C.isas())}" in ran.stdout
    assert ("Nothing is wrong." in ran.stdout) is (ran.returncode == 0)


def test_broken_core(tmp_path):
    """Without the extension an import fails, and the report names the command that mends it."""
    shutil.copytree(PACKAGE, tmp_path / "bitshard", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    ran = report(tmp_path)
    assert (
        ran.returncode == 1
        and "C core        cannot be imported" in ran.stdout
        and "To mend: pip install" in ran.stdout
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", "import bitshard"], capture_output=True, text=True, env=environment)
    assert ran.returncode == 1 and "python -m bitshard" in ran.stderr
