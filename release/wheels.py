"""Builds what a release has: wheels, with --sdist a source distribution, and with both their sums.

    python release/wheels.py [--sdist] [--out dist] [--architectures all] [--machines x86_64,aarch64]

`make wheels` and `make release` run it. The engine's wheels are compiled by zig's clang for glibc 2.28, whatever this
machine has, and checked by auditwheel: one for each machine, with the headers of this one's Python, whose limited API
is the same on both. Each has code for every GPU architecture of setup.py's list if nvcc is found; without nvcc this is
an error, unless --architectures none says that CPU-only wheels are wanted.

The same tree gives the same bytes with the same version of Python and of nvcc: everything is built from a copy of the
tracked files, with times from SOURCE_DATE_EPOCH (default: the last commit's), pinned tools (release/tools.txt) and none
of the interpreter's own compiler flags. Python's headers have inline functions (Py_INCREF), which differ between 3.11
and 3.12: the engine's wheels that were built with them differ, though each runs on both.

BITSHARD_URL is the project's page, for the metadata and for links of README, which lead into the tree here and nowhere
on an index.
"""

import argparse
import contextlib
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".cache" / "release-tools"
TOOLS_TARGET = ".cache/release-tools/.installed"  # of make
# nvcc puts a hash of a source's path into the names of what is internal to it. This is the path that it shall hash.
CUDA_VARIABLES = {"NVCC_APPEND_FLAGS": "-Xcicc=--orig_src_path_name -Xcicc=kernel.cu"}
GLIBC = "2.28"
MACHINES = ("x86_64", "aarch64")
BUILD_WHEEL = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def run(command: list[str], cwd: Path, **variables: str) -> str:
    """A command's output; ends this program where it fails."""
    env = {**os.environ, "PYTHONPATH": str(TOOLS), **variables}
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[:6])} ... failed with status {done.returncode}")
    return done.stdout


def epoch() -> str:
    """Seconds that stand for every file's time."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return given or run(["git", "log", "-1", "--format=%ct"], ROOT).strip()


def export(target: Path) -> None:
    """The tracked files, as they are in the work tree."""
    for name in run(["git", "ls-files", "-z"], ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def add_url(tree: Path, url: str) -> None:
    """The project's page in the metadata of both projects, and links into the tree in their READMEs as links there."""
    for project in ("", "python/bitsandbytes"):
        toml, readme = tree / project / "pyproject.toml", tree / project / "README.md"
        toml.write_text(f'{toml.read_text()}\n[project.urls]\nHomepage = "{url}"\nSource = "{url}"\n')

        def absolute(link: re.Match, project: str = project) -> str:
            path = os.path.normpath(os.path.join(project, link[2]))
            return f"{link[1]}({url}/{'raw' if link[1].startswith('!') else 'blob'}/HEAD/{path})"

        readme.write_text(re.sub(r"(!?\[[^\]]*\])\((?!\w+:|#)([^)\s]+)\)", absolute, readme.read_text()))


def sdist(tree: Path, out: Path, seconds: str) -> Path:
    """A source distribution with sorted members of one owner and one time."""
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "setup.py", "-q", "sdist", "-d", folder], tree)
        (made,) = Path(folder).glob("*.tar.gz")
        target, packed = out / made.name, io.BytesIO()
        with tarfile.open(made) as source, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as result:
            for member in sorted(source.getmembers(), key=lambda member: member.name):
                member.mtime, member.uid, member.gid, member.uname, member.gname = int(seconds), 0, 0, "", ""
                member.mode, member.pax_headers = (0o755 if member.isdir() or member.mode & 0o100 else 0o644), {}
                result.addfile(member, source.extractfile(member) if member.isfile() else None)
    with target.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=int(seconds)) as zipped:
        zipped.write(packed.getvalue())
    return target


def unpacked(archive: Path, folder: Path) -> Path:
    """The tree of a source distribution."""
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and 3.10.12 have it
        opened.extractall(folder)
    (tree,) = folder.iterdir()
    return tree


def compiler(folder: Path, machine: str) -> str:
    """zig's clang as one word, for a glibc that old systems have."""
    script = folder / f"zig-cc-{machine}"
    script.write_text(f'#!/bin/sh\nexec "{TOOLS}/ziglang/zig" cc -target {machine}-linux-gnu.{GLIBC} "$@"\n')
    script.chmod(0o755)
    return str(script)


def engine(tree: Path, out: Path, machine: str, architectures: str, seconds: str, folder: Path) -> Path:
    """The engine's wheel for a machine."""
    cuda = {"BITSHARD_CUDA": "0"} if architectures == "none" else {"BITSHARD_CUDA_ARCHS": architectures}
    cc, tag = compiler(folder, machine), f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    flags = {"CC": cc, "LDSHARED": f"{cc} -shared", "CFLAGS": "-DNDEBUG -fwrapv", "CPPFLAGS": "", "LDFLAGS": "-s"}
    common = {"BITSHARD_WERROR": "1", "SOURCE_DATE_EPOCH": seconds, **flags, **CUDA_VARIABLES}
    common["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
    run([sys.executable, "setup.py", "-q", "bdist_wheel", "--plat-name", tag, "-d", str(out)], tree, **cuda, **common)
    (wheel,) = out.glob(f"bitshard-*-{tag}.whl")
    return wheel


def facade(tree: Path, out: Path, seconds: str) -> Path:
    """The façade's wheel."""
    project = tree / "python" / "bitsandbytes"
    run([sys.executable, "-c", BUILD_WHEEL, str(out)], project, SOURCE_DATE_EPOCH=seconds)
    (wheel,) = out.glob("bitsandbytes-*.whl")
    return wheel


def check(wheel: Path) -> str:
    """auditwheel's verdict; ends this program where the wheel needs a newer system than its name says."""
    said = run([sys.executable, "-m", "auditwheel", "show", str(wheel)], wheel.parent)
    machine = wheel.stem.partition(f"{GLIBC.replace('.', '_')}_")[2]
    found = re.search(rf'"manylinux_2_(\d+)_{machine}"', said)
    if found is None or int(found[1]) > int(GLIBC.partition(".")[2]):
        sys.exit(f"{wheel.name} does not fit its name:\n{said}")
    return found[0].strip('"')


def sums(files: list[Path]) -> str:
    """Lines as sha256sum writes them."""
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(files))


def main() -> None:
    """Build into the folder, which has nothing else then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--sdist", action="store_true", help="the source distribution and the sums, too")
    parser.add_argument("--architectures", default="all", help="as BITSHARD_CUDA_ARCHS; none: CPU only")
    parser.add_argument("--machines", default=",".join(MACHINES), help="of the engine's wheels")
    options = parser.parse_args()
    machines = options.machines.split(",")
    with private_folder() as folder:
        try_tools(options.architectures, machines, folder)
        seconds = epoch()
        (folder / "tree").mkdir()
        (folder / "made").mkdir()
        export(folder / "tree")
        if url := os.environ.get("BITSHARD_URL", "").rstrip("/"):
            add_url(folder / "tree", url)
        archive = sdist(folder / "tree", folder / "made", seconds)
        tree = unpacked(archive, folder / "sources")
        files = [engine(tree, folder / "made", machine, options.architectures, seconds, folder) for machine in machines]
        verdict = ", ".join(map(check, files))
        files.append(facade(tree, folder / "made", seconds))
        files += [archive] if options.sdist else []
        shutil.rmtree(options.out, ignore_errors=True)
        options.out.mkdir(parents=True)
        for path in files:
            shutil.copy(path, options.out / path.name)
    made = [options.out / path.name for path in files]
    if options.sdist:
        (options.out / "SHA256SUMS").write_text(sums(made))
    for path in made:
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.name}")
    print(f"auditwheel: {verdict}; headers of Python {sysconfig.get_python_version()}")
    if not url:
        print("BITSHARD_URL is not set: the metadata names no page of the project")


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder that only this user can open, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="bitshard-release-") as folder:
        yield Path(folder)


def python_h(folder: Path, machine: str) -> list[str]:
    """What compiles Python's headers and nothing else."""
    (folder / "try.c").write_text("#include <Python.h>\n")
    words = [f"-I{sysconfig.get_path('include')}", "-c", str(folder / "try.c"), "-o", str(folder / "try.o")]
    return [compiler(folder, machine), *words]


def try_tools(architectures: str, machines: list[str], folder: Path) -> None:
    """Run each tool once, so that none is found missing after minutes of compiling; ends this program then."""
    again = f"`rm -r {TOOLS}` and `make {TOOLS_TARGET}` fetches release/tools.txt again"
    python = [sys.executable, "-c"]
    tried = {
        "auditwheel": ([sys.executable, "-m", "auditwheel", "--version"], again),
        "setuptools": ([*python, "import setuptools, elftools, packaging"], again),
        "zig": ([str(TOOLS / "ziglang" / "zig"), "version"], again),
        "git": (["git", "--version"], "a release is made of tracked files"),
    }
    for machine in machines:
        tried[f"Python.h for {machine}"] = (
            python_h(folder, machine),
            f"the headers of {sys.executable} are not where it says, or spread over folders",
        )
    if architectures != "none":
        nvcc = shutil.which("nvcc", path=nvcc_path())
        if nvcc is None:
            sys.exit("nvcc is not on the PATH nor below CUDA_HOME; --architectures none makes a CPU-only wheel")
        tried["nvcc"] = ([nvcc, "--version"], "--architectures none makes a CPU-only wheel")
    for name, (command, help_) in tried.items():
        try:
            ran = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": str(TOOLS)}, capture_output=True, text=True, timeout=60
            )
            said = ran.returncode and (ran.stderr.strip().splitlines() or [f"status {ran.returncode}"])[-1]
        except OSError as error:
            said = str(error)
        if said:
            sys.exit(f"{name} does not run: {said}; {help_}")


def nvcc_path() -> str:
    """Where setup.py looks for nvcc."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(home) / "bin")])


if __name__ == "__main__":
    main()
