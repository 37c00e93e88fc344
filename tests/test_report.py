"""`python -m bitshard`: it says what is there, and also runs where the C core does not."""

import os
import pathlib
import shutil
import subprocess
import sys

import bitshard
import pytest

PACKAGE = pathlib.Path(bitshard.__file__).parent


def report(*first: pathlib.Path, **variables: str) -> subprocess.CompletedProcess:
    """What the command says where the folders `first` come before the one of the tested package."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*first, PACKAGE.parent])), **variables}
    command = [sys.executable, "-m", "bitshard"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_sound_installation():
    ran = report()
    assert not ran.stderr and f"C core        {bitshard.__version__}" in ran.stdout
    assert f"usable: {', '.join(bitshard._C.isas())}" in ran.stdout
    assert ("Nothing is wrong." in ran.stdout) is (ran.returncode == 0)


def test_import_leaves_cuda_alone():
    """Neither the driver is loaded nor torch's CUDA initialized by an import."""
    code = (
        "import torch; maps = lambda: 'libcuda.so' in open('/proc/self/maps').read(); before = maps();"
        "import bitshard, bitsandbytes; print(maps() == before, torch.cuda.is_initialized())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "True False\n", ran.stdout + ran.stderr


@pytest.mark.parametrize("isa", bitshard._C.isas())
def test_isa_of_the_environment(isa):
    assert f"CPU kernels   {isa} (usable:" in report(BITSHARD_ISA=isa).stdout


def test_unknown_isa():
    """The report names the variable, and not a new installation, as what to mend."""
    ran = report(BITSHARD_ISA="neon")
    assert ran.returncode == 1 and "unknown instruction set" in ran.stdout
    assert "To mend: unset BITSHARD_ISA\n" in ran.stdout


def test_original_bitsandbytes_is_active(tmp_path):
    """An original on the path takes the façade's place, and transformers then does not use bitshard."""
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").touch()
    (tmp_path / "bitsandbytes-0.50.2.dist-info").mkdir()
    (tmp_path / "bitsandbytes-0.50.2.dist-info" / "METADATA").write_text("Name: bitsandbytes\nVersion: 0.50.2\n")
    ran = report(tmp_path)
    assert ran.returncode == 1 and "0.50.2: upstream, so bitshard is not used" in ran.stdout
    assert "To mend: pip install" in ran.stdout and "./python/bitsandbytes" in ran.stdout


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
