"""Put what on_gpu.py and on_gpu_unsloth.py need of the tools into one folder, to carry to a machine with GPUs.

python benchmarks/checks/tools/pack_gpu.py [FOLDER]             # .cache/tools-gpu: sources only one archive
python benchmarks/checks/tools/pack_gpu.py --upstream cuda130   # the original too, with its library for that
python benchmarks/checks/tools/pack_gpu.py --whole 3.12         # what unsloth's trainer imports, for that Python
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[3] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "tools")]

import fetch  # noqa: E402
from helpers import upstream  # noqa: E402

PACKAGES = {"axolotl": ("axolotl", "addict"), "unsloth": ("unsloth", "unsloth_zoo", "unsloth_zoo_downloads")}


# What `import unsloth` and trl's SFTTrainer import, beside torch, transformers, accelerate and what these need.
WHOLE = """
trl==1.15.0 datasets==4.8.4 peft==0.21.2 pyarrow==26.0.1 pandas==3.1.1 python-dateutil six xxhash dill multiprocess
tyro docstring_parser shtab msgspec cut_cross_entropy psutil httpx httpcore h11 anyio idna certifi sniffio requests
charset_normalizer urllib3
""".split()
# pyarrow has each of its libraries up to three times, and some that nothing here loads
NOT_NEEDED = ("tests", "include", "__pycache__", "bin")
LIBRARIES_NOT_NEEDED = ("flight", "_s3", "s3fs", "gcsfs", "azurefs", "hdfs", "_orc", "encryption", "gandiva")


def add(archive: tarfile.TarFile, root: Path, folder: str, keep) -> None:
    """The files of root/folder that `keep` says yes to, under their names below root."""
    for path in sorted((root / folder).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and keep(path):
            archive.add(path, arcname=str(path.relative_to(root)), recursive=False)


def pack(target: Path, cuda: str) -> None:
    """tools.tar.xz, and upstream.tar.xz where `cuda` names a library."""
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target / "tools.tar.xz", "w:xz") as archive:
        for tool, packages in PACKAGES.items():
            for package in packages:
                add(archive, fetch.folder(tool), package, lambda path: path.suffix in (".py", ".json"))
            for name in (f"{tool}-{version(tool)}.dist-info", f"{tool}_zoo-{version(tool)}.dist-info"):
                add(archive, fetch.folder(tool), name, lambda path: path.name == "METADATA")
        pins = "\n".join(fetch.PINS["axolotl"] + fetch.PINS["unsloth"]).encode()
        info = tarfile.TarInfo("pins.txt")
        info.size = len(pins)
        archive.addfile(info, io.BytesIO(pins))
    if cuda:
        with tarfile.open(target / "upstream.tar.xz", "w:xz") as archive:
            wanted = f"libbitsandbytes_{cuda}.so"
            add(archive, upstream.folder(), "bitsandbytes", lambda path: path.suffix == ".py" or path.name == wanted)
            name = f"bitsandbytes-{upstream.VERSION}.dist-info"
            add(archive, upstream.folder(), name, lambda path: path.name == "METADATA")


def pack_whole(target: Path, python: str) -> None:
    """whole.tar.xz: WHOLE from PyPI for Linux on x86-64 and the given version of Python, without what is not needed."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--no-compile"]
    for tag in ("2_28", "2_24", "2_17"):
        command += ["--platform", f"manylinux_{tag}_x86_64"]
    with tempfile.TemporaryDirectory() as folder, tarfile.open(target / "whole.tar.xz", "w:xz", preset=3) as archive:
        subprocess.run([*command, "--platform", "manylinux2014_x86_64", "--target", folder, *WHOLE], check=True)
        add(archive, Path(folder), ".", lambda path: needed(path.relative_to(folder)))


def needed(path: Path) -> bool:
    """Whether a file of an installed package is imported, loaded or read as metadata."""
    if any(part in NOT_NEEDED for part in path.parts):
        return False
    if path.parent.name.endswith(".dist-info"):
        return path.name in ("METADATA", "entry_points.txt")
    if path.parts[0] != "pyarrow":
        return path.suffix not in (".pyi", ".pyx", ".pxd", ".pxi")
    if ".so" in path.suffixes and path.name.startswith("lib") and not path.name.startswith("lib."):
        stem, *version = path.name.partition(".so")[2].split(".")
        return len(version) == 1 and not any(word in path.name for word in LIBRARIES_NOT_NEEDED)
    return path.suffix in (".py", ".so") and not any(word in path.name for word in LIBRARIES_NOT_NEEDED)


def version(tool: str) -> str:
    """The version that fetch.py pins."""
    return fetch.PINS[tool][0].partition("==")[2]


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("folder", nargs="?", type=Path, default=fetch.FOLDER.parent / "tools-gpu")
    options.add_argument("--upstream", default="", metavar="CUDA", help="as cuda130")
    options.add_argument("--whole", default="", metavar="PYTHON", help="as 3.12")
    args = options.parse_args()
    pack(args.folder, args.upstream)
    if args.whole:
        pack_whole(args.folder, args.whole)
    for path in sorted(args.folder.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path}")
