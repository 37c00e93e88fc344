"""Rules of the house that a reader could break without noticing: sizes of files, one table, one list of ops."""

import pathlib
import re
import subprocess
import sys
import tarfile

import bitshard
import pytest
import torch

ROOT = pathlib.Path(__file__).parents[1]
OPS = sorted(name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("bitshard::"))
SOURCES = (".py", ".pyi", ".c", ".h", ".cu", ".cuh", ".sh", ".toml", ".yaml", ".md", ".txt", "Makefile", "run")


def files() -> list[pathlib.Path]:
    """Text files under version control, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the git checkout: {error}")
    return [ROOT / name for name in listed if name.endswith(SOURCES) and (ROOT / name).is_file()]


def read(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")


def test_there_are_ops_and_files():
    assert len(OPS) == 7 and len(files()) > 30


def test_no_file_is_too_long():
    code = [path for path in files() if path.suffix in (".py", ".pyi", ".c", ".h", ".cu", ".cuh")]
    assert not {str(path): n for path in code if (n := read(path).count("\n")) > 800}


def test_no_second_nf4_table():
    """NF4's values are in csrc/formats.h and nowhere else; Python asks the C core."""
    value = re.compile(r"0\.69619|BF3239B0|0\.52507|0\.72295", re.IGNORECASE)
    code = [path for path in files() if path.suffix != ".md"]
    holders = [path.relative_to(ROOT).as_posix() for path in code if value.search(read(path))]
    assert [path for path in holders if path != "tests/test_source.py"] == ["csrc/formats.h"]


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_whole(op):
    """A fake, a reference, a test, a leak test, an opcheck and a name in ops.py."""
    ops = read(ROOT / "python/bitshard/ops.py")
    assert f'register_fake("bitshard::{op}")' in ops and f"torch.ops.bitshard.{op}.default" in ops
    assert f"def {op}(" in read(ROOT / "tests/reference.py")
    tests = read(ROOT / "tests/test_quantize.py")
    assert f"ops.{op}(" in tests and f'"{op}": lambda' in tests
    assert f'"{op}"' in read(ROOT / "tests/test_compile.py")


def test_stubs_name_what_the_core_has():
    """_C.pyi and the extension have the same functions, each with a docstring."""
    stub = read(ROOT / "python/bitshard/_C.pyi")
    described = set(re.findall(r"^def (\w+)\(", stub, re.MULTILINE)) | set(re.findall(r"^(\w+): ", stub, re.MULTILINE))
    real = {name for name in dir(bitshard._C) if not name.startswith("_")}
    assert described == real
    assert all(getattr(bitshard._C, name).__doc__ for name in real)


def test_references_are_short():
    text = read(ROOT / "tests/reference.py")
    for body in re.split(r"^def ", text, flags=re.MULTILINE)[1:]:
        assert body.rstrip().count("\n") <= 15, body.split("(")[0]


def test_no_paths_of_a_machine():
    """No absolute path of somebody's machine, and no host name of a package registry."""
    bad = re.compile(r"/(?:home|root|Users)/\w|/work/|/tmp/b/|pypi\.org|pythonhosted|download\.pytorch|files\.py")
    found = {str(path): bad.search(read(path)).group() for path in files() if bad.search(read(path))}
    found.pop(str(pathlib.Path(__file__)), None)
    assert not found


def test_no_leftovers():
    """No notes to oneself, no commented-out Python code."""
    note = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b|^\s*# *(?:print\(|import |def |return )", re.MULTILINE)
    code = [
        path for path in files() if path.suffix in (".py", ".c", ".h", ".cu", ".cuh") and path.name != "test_source.py"
    ]
    assert not {str(path): note.search(read(path)).group() for path in code if note.search(read(path))}


def test_source_distribution_is_whole(tmp_path):
    """Everything that a build needs is in the sdist."""
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (archive,) = tmp_path.glob("bitshard-*.tar.gz")
    with tarfile.open(archive) as names:
        packed = {name.partition("/")[2] for name in names.getnames()}
    needed = [path.relative_to(ROOT).as_posix() for path in files()]
    needed = [name for name in needed if name.startswith(("csrc/", "cuda/", "python/bitshard/"))]
    assert len(needed) > 40 and not set(needed) - packed and {"setup.py", "pyproject.toml", "LICENSE"} <= packed


def test_arrows_point_down():
    """Lower layers import nothing from higher ones."""
    order = ["ops", "state", "checks", "maps", "container", "shard", "gather", "blockwise", "functional", "guards"]
    order += ["tensor", "autograd", "holder", "linear"]
    for i, name in enumerate(order):
        text = read(ROOT / f"python/bitshard/{name}.py")
        top = set(re.findall(r"^from bitshard(?:\.(\w+))? import", text, re.MULTILINE))
        names = re.findall(r"^from bitshard import ([\w, ]+)$", text, re.MULTILINE)
        top |= {part.strip() for line in names for part in line.split(",")}
        higher = set(order[i:]) | {"fsdp", "sharding", "parametrize"}
        assert not (top & higher), (name, top & higher)
