"""`make release` without CUDA: two wheels and a source distribution, for old systems, the same bytes again."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GIVEN = ("BITSHARD_URL", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "TESTS", "PYTHON", "LANES", "PYTEST", "PYTHONPATH", "CC")


def environment(**variables):
    """Without what the run of make set that this is part of."""
    return {name: value for name, value in os.environ.items() if name not in GIVEN} | variables


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Folder of what `make release ARCHITECTURES=none` makes."""
    tools = ROOT / ".cache" / "release-tools" / ".installed"
    out = tmp_path_factory.mktemp("dist")
    command = ["make", "-s", ".cache/release-tools/.installed", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment())
    if done.returncode:
        pytest.skip(f"the tools of a release cannot be fetched: {done.stderr[-200:]}")
    assert tools.exists()
    build(out, "1764000000")
    return out


def build(out: Path, seconds: str) -> str:
    command = [sys.executable, "release/wheels.py", "--sdist", "--architectures", "none", "--out", str(out)]
    env = environment(SOURCE_DATE_EPOCH=seconds)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_names_and_sums(wheels):
    names = sorted(path.name for path in wheels.iterdir())
    assert names == [
        "SHA256SUMS", "bitsandbytes-0.50.2+bitshard.0.1.0-py3-none-any.whl",
        "bitshard-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl", "bitshard-0.1.0.tar.gz",
    ]  # fmt: skip
    for line in (wheels / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((wheels / name).read_bytes()).hexdigest() == digest
    assert len((wheels / "SHA256SUMS").read_text().splitlines()) == 3


def test_the_same_bytes_again(wheels, tmp_path):
    said = build(tmp_path / "again", "1764000000")
    assert (tmp_path / "again" / "SHA256SUMS").read_text() == (wheels / "SHA256SUMS").read_text()
    (found,) = re.findall(r"auditwheel: manylinux_2_(\d+)_x86_64", said)
    assert int(found) <= 28


def test_what_the_wheel_holds(wheels):
    (wheel,) = wheels.glob("bitshard-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        metadata = opened.read("bitshard-0.1.0.dist-info/METADATA").decode()
        entries = opened.read("bitshard-0.1.0.dist-info/entry_points.txt").decode()
        times = {info.date_time for info in opened.infolist()}
    assert "bitshard/_C.abi3.so" in names and "bitshard_cli/facade/bitsandbytes/__init__.py" in names
    assert not [name for name in names if name.startswith(("bitsandbytes", "tests"))]
    assert "bitshard = bitshard_cli.main:main" in entries and "[bitsandbytes.backends]" in entries
    for line in ("License-Expression: MIT", "Requires-Python: >=3.10", "Requires-Dist: torch>=2.10", "Author: "):
        assert line in metadata
    assert len(times) == 1


def test_the_project_s_page(tmp_path):
    """With BITSHARD_URL: in the metadata of both projects; links of READMEs lead there, others stay as they are."""
    spec = importlib.util.spec_from_file_location("release_wheels", ROOT / "release" / "wheels.py")
    release = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release)
    for project in ("", "python/bitsandbytes"):
        (tmp_path / project).mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / project / "pyproject.toml", tmp_path / project / "pyproject.toml")
        text = "[a](docs/a.md#b) ![c](d.svg) [e](https://x.org/f) [g](#h)\n"
        (tmp_path / project / "README.md").write_text(text)
    release.add_url(tmp_path, "https://example.org/b")
    for project, below in (("", ""), ("python/bitsandbytes", "python/bitsandbytes/")):
        assert (tmp_path / project / "README.md").read_text() == (
            f"[a](https://example.org/b/blob/HEAD/{below}docs/a.md#b) "
            f"![c](https://example.org/b/raw/HEAD/{below}d.svg) [e](https://x.org/f) [g](#h)\n"
        )
        toml = (tmp_path / project / "pyproject.toml").read_text()
        assert toml.count('[project.urls]\nHomepage = "https://example.org/b"\n') == 1


def test_into_an_empty_environment(wheels, tmp_path):
    """Neither torch nor a compiler: the command is there, exchanges and goes back, and says what is missing."""
    folder = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (wheel,) = wheels.glob("bitshard-*.whl")
    python = str(folder / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-qq", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=120, env=environment())
    env = {"PATH": str(folder / "bin"), "HOME": str(tmp_path)}

    def bitshard(*words):
        command = [str(folder / "bin" / "bitshard"), *words]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)

    report = bitshard("report")
    assert report.returncode == 1 and "torch         cannot be imported" in report.stdout
    assert "To mend: pip install torch" in report.stdout and not report.stderr
    assert "is active" in bitshard("use").stdout
    version = "import importlib.metadata as m; print(m.version('bitsandbytes'))"
    ran = subprocess.run([python, "-c", version], capture_output=True, text=True, env=env, timeout=60)
    assert ran.stdout == "0.50.2+bitshard.0.1.0\n", ran.stderr
    check = [sys.executable, "-m", "pip", "--python", python, "list", "--format", "freeze"]
    listed = subprocess.run(check, capture_output=True, text=True, env=environment(), timeout=60).stdout
    assert "bitsandbytes==0.50.2+bitshard.0.1.0" in listed and "bitshard==0.1.0" in listed
    assert bitshard("unuse").returncode == 0
    ran = subprocess.run([python, "-c", "import bitsandbytes"], capture_output=True, text=True, env=env, timeout=60)
    assert "No module named 'bitsandbytes'" in ran.stderr
    assert bitshard("--version").stdout == "0.1.0\n"


def test_the_source_distribution_builds(wheels, tmp_path):
    """The wheels above were built from it; that it holds what they need is so proven. Nothing else is in it."""
    import tarfile

    with tarfile.open(wheels / "bitshard-0.1.0.tar.gz") as opened:
        names = [name.partition("/")[2] for name in opened.getnames()]
        assert {member.mtime for member in opened.getmembers()} == {1764000000}
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "python/bitsandbytes/pyproject.toml"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", ".cache", "benchmarks")) or name.endswith(".so")]
