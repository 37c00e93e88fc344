"""Run the whole of bitsandbytes' own tests on the façade. A tool for the hand; pytest does not collect it.

    python benchmarks/checks/run_upstream_suite.py PATH [pytest options]
    python benchmarks/checks/run_upstream_suite.py --plug-in PATH [pytest options]   # on the original, with the plug-in

PATH is a checkout of bitsandbytes 0.50.2 (a tag or commit near it). Its `tests/` are copied to a folder of their own,
where `import bitsandbytes` finds what this Python has installed, not the checkout's package; nothing is written to the
checkout. On a CPU at least 2,333 must pass and none may fail; of the 4-bit half, which the plug-in serves, 1,308.
bitsandbytes' own CPU build passes 8 more outside test_optim.py: `LEFT_OUT` says which and why. lion-pytorch is needed.
With a GPU every test runs on both devices, with BNB_TEST_DEVICE=cuda on the GPU only; `FAILS_ON_A_GPU` names 31 tests
that must fail there. `-n 8` divides the tests among processes (pytest-xdist).
"""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "0.50.2"
MARKERS = "not slow and not benchmark and not deprecated"  # upstream's own choice, in its pyproject.toml
# test (all of its parameters) -> why it cannot be run; upstream's private internals only
_LIBRARIES = "patches upstream's private search for its library files (_find_cuda_libs); bitshard has one for all"
LEFT_OUT = {
    "test_cuda_setup_evaluator.py::test_version_selection": _LIBRARIES,
    "test_cuda_setup_evaluator.py::test_override": _LIBRARIES,
    "test_cuda_setup_evaluator.py::test_rocm_override": _LIBRARIES,
}
# Tests that must fail on a GPU: name -> (exception, why). They pass with bitsandbytes.
FAILS_ON_A_GPU = {
    # Twice 15 tests. Seven lines above, the same comparison moves the state to the GPU first; this one does not.
    r"test_optim\.py::test_optimizer32bit\[device=cuda-dim2=(1024|4097)-.*-opt=paged_\w+\]$": (
        RuntimeError,
        "compares a loaded paged state with one on the GPU by torch.isclose, which takes tensors of one device only. "
        "bitsandbytes' state is no longer paged when it is loaded, but on the GPU; bitshard's stays in host memory",
    ),
    r"test_modules\.py::test_linear8bitlt_no_fp16_weights\[2\.0-cuda\]$": (
        AssertionError,
        "asserts that the layer's state lists the outlier columns of its last forward (MatmulLtState.idx), which only "
        "upstream's own autograd function reads. The host would have to wait for the GPU to learn them",
    ),
}
# The half of the tests whose operators a plug-in can take over
PLUG_IN_FILES = ("test_linear4bit.py", "test_parametrize.py", "test_autograd.py", "test_ops.py", "test_functional.py")
PLUG_IN_WITHOUT = ("int8", "8bitlt", "torch_compile", "matmullt", "stable_embedding")
EXPECTED_PASSED = {"all": 2333, "plug-in": 1308}


def main(arguments: list[str]) -> int:
    """Run the tests; 0 when none failed and as many passed as on the original."""
    part = "plug-in" if arguments[:1] == ["--plug-in"] else "all"
    arguments = arguments[part == "plug-in" :]
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    checkout = Path(arguments[0]).resolve()
    wrong = unusable(checkout)
    if wrong:
        print(wrong, file=sys.stderr)
        return 2
    print(f"tests of {checkout.name}: bitsandbytes {version(checkout)}, commit {commit(checkout)}")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(checkout / "tests", Path(folder, "tests"), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(checkout / "pyproject.toml", folder)
        shutil.copy(__file__, folder)
        paths = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        paths = [str(Path(path).resolve()) for path in paths]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), PYTHONDONTWRITEBYTECODE="1")
        wrong = judged(folder, environment, part)
        if wrong:
            print(wrong, file=sys.stderr)
            return 2
        failed, passed = run([*chosen(part), *arguments[1:]], folder, environment)
    for test, reason in LEFT_OUT.items() if part == "all" else ():
        print(f"not run: {test}: {reason}")
    print(f"{passed} passed, at least {EXPECTED_PASSED[part]} must, and no test may fail")
    return 1 if failed or (len(arguments) == 1 and passed < EXPECTED_PASSED[part]) else 0


def unusable(checkout: Path) -> str:
    """Why these tests cannot be run; "" if they can."""
    if not (checkout / "tests" / "test_functional.py").exists() or not (checkout / "pyproject.toml").exists():
        return f"{checkout} is no checkout of bitsandbytes: it lacks tests/test_functional.py or pyproject.toml"
    if not version(checkout).startswith(VERSION):
        return f"{checkout} is bitsandbytes {version(checkout)}, its tests are not those of {VERSION}"
    if importlib.util.find_spec("lion_pytorch") is None:
        return "upstream's optimizer tests compare with the package lion-pytorch, which is not installed"
    return ""


def version(checkout: Path) -> str:
    """`__version__` of the checkout's package; "" without one."""
    file = checkout / "bitsandbytes" / "__init__.py"
    found = re.search(r"^__version__ = (.+)$", file.read_text(encoding="utf-8") if file.exists() else "", re.MULTILINE)
    return ast.literal_eval(found[1]) if found else ""


def commit(checkout: Path) -> str:
    """The commit that is checked out, of a git repository."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%H of %cs"]
    own = (checkout / ".git").exists()
    done = subprocess.run(command, capture_output=True, text=True) if own else None
    return done.stdout.strip() if done and done.returncode == 0 else "unknown (no git repository)"


def judged(folder: str, environment: dict[str, str], part: str) -> str:
    """Print which package the tests will import; why it is not the one to be judged, or ""."""
    code = "import bitsandbytes; print(bitsandbytes.__version__, bitsandbytes.__file__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        return f"bitsandbytes cannot be imported: {done.stderr.strip()[-2000:]}"
    found = done.stdout.strip().splitlines()[-1]
    print(f"judged: bitsandbytes {found}")
    if ("+bitshard." in found) is (part == "plug-in"):
        return f"bitsandbytes here is {found}, not {'the original' if part == 'plug-in' else 'the façade'}"
    if part == "plug-in":
        from bitshard_cli import plugin

        print(f"plug-in: {plugin.state()}")
        return "" if plugin.state().startswith("bitshard's kernels") else "the plug-in does not serve it"
    return ""


def chosen(part: str) -> list[str]:
    """Arguments of pytest that name the tests of a part."""
    if part == "plug-in":
        words = " and ".join(f"not {word}" for word in PLUG_IN_WITHOUT)
        return ["-k", words, *(f"tests/{name}" for name in PLUG_IN_FILES)]
    return ["-p", Path(__file__).stem, "tests"]


def pytest_collection_modifyitems(config, items) -> None:
    """Of this file as a plugin of pytest: take out what is in LEFT_OUT, expect what is in FAILS_ON_A_GPU to fail."""
    import pytest

    names = {f"tests/{test}" for test in LEFT_OUT}
    left_out = [item for item in items if item.nodeid.partition("[")[0] in names]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    for item in items:
        for name, (error, why) in FAILS_ON_A_GPU.items():
            if re.search(name, item.nodeid):
                item.add_marker(pytest.mark.xfail(raises=error, strict=True, reason=why))


def run(tests: list[str], folder: str, environment: dict[str, str]) -> tuple[bool, int]:
    """Run pytest and show what it prints: (has anything failed, number of tests that passed)."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "-o", "log_cli=false", "-o", f"log_file={os.devnull}", "-m", MARKERS, *tests]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    last = ""
    for line in process.stdout:
        print(line, end="")
        last = line.strip() or last
    found = re.search(r"(\d+) passed", last)
    return process.wait() != 0, int(found[1]) if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
