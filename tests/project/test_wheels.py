"""`make release` without CUDA: wheels and a source distribution, for old systems, for two machines, the same bytes
again. And what setup.py says and asks while it compiles."""

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


def loaded(file: str) -> types.ModuleType:
    """A script of the tree as a module."""
    spec = importlib.util.spec_from_file_location(f"loaded_{Path(file).stem}", ROOT / file)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **options: None)  # setup.py would build
        spec.loader.exec_module(module)
    return module


def test_names_and_sums(wheels):
    names = sorted(path.name for path in wheels.iterdir())
    assert names == [
        "SHA256SUMS", "bitsandbytes-0.50.2+bitshard.0.1.0-py3-none-any.whl",
        "bitshard-0.1.0-cp310-abi3-manylinux_2_28_aarch64.whl", "bitshard-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl",
        "bitshard-0.1.0.tar.gz",
    ]  # fmt: skip
    for line in (wheels / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((wheels / name).read_bytes()).hexdigest() == digest
    assert len((wheels / "SHA256SUMS").read_text().splitlines()) == 4


def test_the_same_bytes_again(wheels, tmp_path):
    said = build(tmp_path / "again", "1764000000")
    assert (tmp_path / "again" / "SHA256SUMS").read_text() == (wheels / "SHA256SUMS").read_text()
    (found,) = re.findall(r"auditwheel: manylinux_2_(\d+)_x86_64, manylinux_2_(\d+)_aarch64;", said)
    assert max(map(int, found)) <= 28


def test_the_tools_need_nothing_else(wheels, tmp_path):
    """Pinned as a whole: they run by an interpreter that has no package of its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True, timeout=60)
    env = {"PATH": "", "PYTHONPATH": str(ROOT / ".cache" / "release-tools")}
    command = [str(tmp_path / "bin" / "python"), "-m", "auditwheel", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("missing", ["tools", "nvcc"])
def test_tools_are_tried_before_anything_is_built(monkeypatch, tmp_path, missing):
    release = loaded("release/wheels.py")
    monkeypatch.setattr(release, "export", lambda target: pytest.fail("began to build"))
    monkeypatch.setattr(sys, "argv", ["wheels.py", "--out", str(tmp_path / "dist")])
    if missing == "tools":
        monkeypatch.setattr(release, "TOOLS", tmp_path / "empty")
        said = r"auditwheel.*rm -r .*make"
    else:
        stand_in(tmp_path / "bin", "nvcc", "echo no licence >&2; exit 3")
        monkeypatch.setattr(release, "TOOLS", stand_in_tools(tmp_path))
        monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]))
        said = r"nvcc.*no licence"
    with pytest.raises(SystemExit, match=said):
        release.main()
    assert not (tmp_path / "dist").exists()


def stand_in_tools(folder: Path) -> Path:
    """Modules and a compiler that run and do nothing."""
    for name in ("auditwheel", "elftools", "setuptools", "packaging"):
        (folder / "tools" / name).mkdir(parents=True)
        for file in ("__init__.py", "__main__.py"):
            (folder / "tools" / name / file).touch()
    stand_in(folder / "tools" / "ziglang", "zig", "exit 0")
    return folder / "tools"


def test_a_release_is_built_in_a_private_folder():
    """Nobody else can be there before, or look into it; two can be built at once."""
    release = loaded("release/wheels.py")
    with release.private_folder() as one, release.private_folder() as other:
        for folder in (one, other):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and not list(folder.iterdir())
        assert one != other
    assert not one.exists() and not other.exists()


def test_nvcc_s_bytes_do_not_depend_on_the_folder(tmp_path, monkeypatch):
    """nvcc puts a hash of a source's path into the names of what is internal to it; a release leaves it out."""
    setup, release = loaded("setup.py"), loaded("release/wheels.py")
    nvcc = setup.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc")
    monkeypatch.setenv("BITSHARD_CUDA_ARCHS", "80,compute_80")
    text = "namespace { __device__ int TABLE[2] = {1, 2}; }\n"
    text += 'extern "C" __global__ void f(int *y) { *y = TABLE[*y]; }\n'
    made = {}
    for variables in ({}, release.CUDA_VARIABLES):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for folder in ("one", "an/other"):
            source = tmp_path / folder / "kernel.cu"
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text(text)
            fatbin = setup.compile_fatbin(nvcc, source, source.parent)
            made.setdefault(len(variables), set()).add(fatbin.read_bytes())
            fatbin.unlink()
    assert len(made[0]) == 2 and len(made[len(release.CUDA_VARIABLES)]) == 1


@pytest.mark.parametrize("machine, elf", [("x86_64", 62), ("aarch64", 183)])
def test_what_a_wheel_holds(wheels, machine, elf):
    (wheel,) = wheels.glob(f"bitshard-*_{machine}.whl")
    with zipfile.ZipFile(wheel) as opened:
        library = opened.read("bitshard/_C.abi3.so")
        assert int.from_bytes(library[18:20], "little") == elf  # e_machine
        assert [name for name in (b"avx512", b"neon") if name + b"\0" in library] == [
            {"x86_64": b"avx512", "aarch64": b"neon"}[machine]
        ]
        assert sys.base_prefix.encode() not in library and str(ROOT).encode() not in library  # as a RUNPATH was
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
    release = loaded("release/wheels.py")
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
    (wheel,) = wheels.glob(f"bitshard-*_{platform.machine()}.whl")
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


# ---- what setup.py says and asks ----


def stand_in(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("said, found", [("8.6", "86"), ("9.0\n8.6\n9.0", "86,90a"), ("12.0", "120")])
def test_the_architecture_of_this_machine(tmp_path, monkeypatch, said, found):
    """BITSHARD_CUDA_ARCHS=native: that of each GPU that nvidia-smi names, once."""
    stand_in(tmp_path / "bin", "nvidia-smi", f"echo \"$@\" >> {tmp_path}/asked\nprintf '{said}\\n'")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("BITSHARD_CUDA_ARCHS", "native")
    setup = loaded("setup.py")
    assert setup.architectures() == setup.architectures() == found.split(",")
    assert (tmp_path / "asked").read_text() == "--query-gpu=compute_cap --format=csv,noheader\n"


@pytest.mark.parametrize(
    "script, words",
    [
        (None, "there is no nvidia-smi"),
        ("echo NVIDIA-SMI has failed; exit 9", "NVIDIA-SMI has failed"),
        ("true", "named no GPU"),
        ("echo '[N/A]'", r"said '\[N/A\]'"),
        ("echo 6.1", "6.1.*7.5"),
    ],
)
def test_no_architecture_of_this_machine(tmp_path, monkeypatch, script, words):
    (tmp_path / "bin").mkdir()
    if script:
        stand_in(tmp_path / "bin", "nvidia-smi", script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("BITSHARD_CUDA_ARCHS", "native")
    with pytest.raises(SystemExit, match=f"(?s)BITSHARD_CUDA_ARCHS=native.*{words}.*BITSHARD_CUDA_ARCHS=86"):
        loaded("setup.py").architectures()


def test_progress_of_nvcc(tmp_path, monkeypatch, capfd):
    """A line before the first source and one for each: which of how many, and seconds; none if nothing is compiled."""
    write = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'
    stand_in(tmp_path / "bin", "nvcc", write)
    monkeypatch.setenv("BITSHARD_CUDA_ARCHS", "75,90a")
    setup = loaded("setup.py")
    sources = [tmp_path / f"{name}.cu" for name in "abc"]
    for source in sources:
        source.touch()
    for _ in range(2):
        fatbins = setup.compile_fatbins(str(tmp_path / "bin" / "nvcc"), sources, tmp_path)
    assert [path.read_text() for path in fatbins] == ["made\n"] * 3
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 4 and "3 CUDA sources for 75,90a" in said[0] and "BITSHARD_CUDA_ARCHS=native" in said[0]
    for n, line in enumerate(said[1:], 1):
        assert re.fullmatch(rf"bitshard: nvcc {n} of 3: [abc]\.cu in \d+ s, \d+ s since the start", line), line
