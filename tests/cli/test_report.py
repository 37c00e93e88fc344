"""`python -m bitshard`: it says what is there, and also runs where the C core does not."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys

import bitshard
import pytest
from bitshard_cli import installed, tried
from helpers import warm

PACKAGE = pathlib.Path(bitshard.__file__).parent
ROOT = pathlib.Path(__file__).parents[2]


def report(*first: pathlib.Path, fresh: bool = False, **variables: str) -> subprocess.CompletedProcess:
    """What the command says where the folders `first` come before the one of the tested package."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*first, PACKAGE.parent])), **variables}
    command = [sys.executable if fresh else warm.bare(), "-m", "bitshard"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_sound_installation():
    ran = report(fresh=True)
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
    """An original on the path takes the façade's place, and transformers then does not use bitshard. PYTHONPATH comes
    first, so an exchange of installed packages would change nothing."""
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").touch()
    (tmp_path / "bitsandbytes-0.50.2.dist-info").mkdir()
    (tmp_path / "bitsandbytes-0.50.2.dist-info" / "METADATA").write_text("Name: bitsandbytes\nVersion: 0.50.2\n")
    ran = report(tmp_path)
    assert ran.returncode == 1 and "0.50.2: upstream, so bitshard is not used" in ran.stdout
    tree = "pip install --force-reinstall --no-deps ./python/bitsandbytes"
    assert f"To mend: {'bitshard run PROGRAM' if installed.CARRIED.is_dir() else tree}" in ran.stdout


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


def test_the_stack_that_was_tried():
    """Each package of the stack with the versions that the suite was run with; none of those installed lies beyond."""
    said = report().stdout
    for package, versions in tried.TRIED.items():
        assert f"tried with    {package} {', '.join(versions)}\n" in said
        assert tried.beyond(package, importlib.metadata.version(package)) is None


def test_a_stack_beyond_what_was_tried(tmp_path):
    """A newer or an older package is named with a warning; that alone is nothing to mend."""
    for package, version in (("torch", "2.97.0+cpu"), ("peft", "0.3.1")):
        (tmp_path / f"{package}-{version}.dist-info").mkdir()
        (tmp_path / f"{package}-{version}.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    ran, newest, oldest = report(tmp_path), tried.TRIED["torch"][-1], tried.TRIED["peft"][0]
    assert f"Warning: 2.97.0+cpu is newer than {newest}, the newest that was tried" in ran.stdout
    assert f"Warning: 0.3.1 is older than {oldest}, the oldest that was tried" in ran.stdout
    assert ran.stdout.count("Warning") == 2 and ran.returncode == report().returncode


@pytest.mark.parametrize(
    "version, doubt",
    [("2.10.2", None), ("2.9.1", "older"), ("2.15.3", None), ("2.16.0.dev20261101", "newer"), ("3.0", "newer")],
)
def test_versions_are_compared_by_two_numbers(monkeypatch, version, doubt):
    monkeypatch.setitem(tried.TRIED, "torch", ("2.10.0", "2.15.0"))
    said = tried.beyond("torch", version)
    assert said is None if doubt is None else said.startswith(doubt)


def test_the_floor_is_stated_once():
    """What pip is told, what `make oldest` installs and what is reported are the same."""
    stated = re.search(r"torch>=([\d.]+)", (ROOT / "pyproject.toml").read_text())[1]
    assert tried.minor(stated) == tried.minor(tried.TRIED["torch"][0])
    pins = dict(re.findall(r"^(\w+)==([\w.]+)$", (ROOT / "tests/oldest.txt").read_text(), re.MULTILINE))
    assert pins == {package: versions[0] for package, versions in tried.TRIED.items()}


def test_free_threaded_python_is_refused():
    """At import in one line, and at build before anything is compiled."""
    free = "import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1;"
    ran = subprocess.run([sys.executable, "-c", f"{free} import bitshard"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and "ImportError: bitshard needs Python with the GIL" in ran.stderr.splitlines()[-1]
    setup = f"{free} import runpy, sys; sys.argv = ['setup.py', 'build']; runpy.run_path('setup.py')"
    ran = subprocess.run([sys.executable, "-c", setup], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ran.returncode == 1 and ran.stderr.startswith("bitshard needs Python with the GIL") and not ran.stdout


def test_subinterpreters_are_refused():
    """torch refuses them itself; the core does where torch would not. (In a process of its own: with a subinterpreter
    torch's autograd takes every thread for one that holds the GIL.)"""
    pytest.importorskip("_xxsubinterpreters", reason="this Python has no such module")
    load = (
        "import importlib.machinery as m, importlib.util as u\n"
        f"loader = m.ExtensionFileLoader('bitshard._C', {bitshard._C.__file__!r})\n"
        "spec = u.spec_from_loader('bitshard._C', loader)\n"
        "loader.exec_module(u.module_from_spec(spec))\n"
    )
    code = f"import bitshard, _xxsubinterpreters as s; s.run_string(s.create(isolated=False), {load!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and "works in the main interpreter only" in ran.stderr, ran.stderr
