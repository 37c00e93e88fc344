"""Put what tests/tools/on_gpu.py needs of the tools into one folder, to carry to a machine with GPUs.

python tests/tools/pack_gpu.py [FOLDER]             .cache/tools-gpu, some MB: sources only, in one archive
python tests/tools/pack_gpu.py --upstream cuda130   the original too, with its library for that CUDA version only
"""

import argparse
import io
import sys
import tarfile
from pathlib import Path

import fetch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import upstream  # noqa: E402

PACKAGES = {"axolotl": ("axolotl", "addict"), "unsloth": ("unsloth", "unsloth_zoo")}


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


def version(tool: str) -> str:
    """The version that fetch.py pins."""
    return fetch.PINS[tool][0].partition("==")[2]


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("folder", nargs="?", type=Path, default=fetch.FOLDER.parent / "tools-gpu")
    options.add_argument("--upstream", default="", metavar="CUDA", help="as cuda130")
    args = options.parse_args()
    pack(args.folder, args.upstream)
    for path in sorted(args.folder.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path}")
