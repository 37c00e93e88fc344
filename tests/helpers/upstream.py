"""The original bitsandbytes in a folder and a process of its own, to test against. Never imported beside the façade."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import warm

VERSION = "0.50.2"
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "upstream"
SCRIPTS = Path(__file__).resolve().parents[1] / "original"


def folder() -> Path:
    """Folder with the package; installs it there on first use. OSError where it cannot be had.

    The environment variable BITSHARD_UPSTREAM names another folder that holds it.
    """
    given = os.environ.get("BITSHARD_UPSTREAM")
    target = Path(given) if given else FOLDER
    if (target / "bitsandbytes" / "__init__.py").exists():
        return target
    if given:
        raise OSError(f"BITSHARD_UPSTREAM={given} holds no package bitsandbytes")
    _install(target)
    return target


def folder_or_skip() -> Path:
    """`folder`, in a test that is skipped where it cannot be had."""
    try:
        return folder()
    except OSError as error:
        pytest.skip(f"needs the original bitsandbytes {VERSION}: {error}")


def _install(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as partial:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--retries", "1", "--timeout", "15"]
        command += ["--no-deps", "--only-binary", ":all:", "--target", partial, f"bitsandbytes=={VERSION}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            raise OSError(f"pip install bitsandbytes=={VERSION} took more than 300 s") from None
        if done.returncode != 0:
            raise OSError(f"pip install bitsandbytes=={VERSION} failed: {done.stderr.strip()[-300:]}")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(partial, target)


def run(script: Path, *arguments: str, timeout: float = 300) -> str:
    """Run a Python script in which `import bitsandbytes` is the original; returns what it printed.

    AssertionError with the output where it fails, or where it did not import the original.
    """
    place = folder()
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))
    check = (
        "import runpy, sys, bitsandbytes\n"
        f"assert bitsandbytes.__file__.startswith({str(place)!r}), bitsandbytes.__file__\n"
        "assert '+' not in bitsandbytes.__version__, bitsandbytes.__version__\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "assert 'bitshard' not in sys.modules\n"
    )
    command = [warm.bare(), "-c", check, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, f"{script.name} {arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
