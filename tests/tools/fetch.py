"""The tools that train and load through `bitsandbytes`, as PyPI has them, each in its folder under .cache/tools.

    python tests/tools/fetch.py [NAME ...]

Only these pins decide what is tried, and those in whole/, one file for each tool that is started as its users do.
What a tool needs beside the environment of the tests lies in its folder too; nothing is installed into the environment,
and nothing of it is committed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "tools"
PINS = {
    "axolotl": ("axolotl==0.19.0", "addict==2.4.0"),
    "unsloth": ("unsloth==2026.10.9", "unsloth_zoo==2026.10.9"),
    "deepspeed": (
        "deepspeed==0.19.8",
        "einops==0.8.2",
        "hjson==3.1.0",
        "msgpack==1.2.4",
        "ninja==1.13.2",
        "py-cpuinfo==9.0.0",
    ),
    "lightning": ("lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0"),
    "diffusers": ("diffusers==0.42.1",),
    "sentence-transformers": (
        "sentence-transformers==6.2.0",
        "cloudpickle==3.1.2",
        "joblib==1.6.0",
        "narwhals==2.29.0",
        "scikit-learn==1.9.1",
        "scipy==1.17.1",
        "threadpoolctl==3.8.0",
    ),
}
# Packages of the versions that a tool's own pins allow; torch is that of the tests.
PINS |= {path.stem: tuple(path.read_text().split()) for path in sorted((Path(__file__).parent / "whole").glob("*.txt"))}


def folder(name: str) -> Path:
    """The folder of a tool, which `make tools-tests` filled. OSError where it did not."""
    if not (FOLDER / name / ".pins").exists():
        raise OSError(f"{FOLDER / name} is not there; `make tools-tests` fetches it")
    return FOLDER / name


def fetch(name: str) -> Path:
    """Fill the folder of a tool, unless it holds these versions already. OSError with pip's words where it fails."""
    target, pins = FOLDER / name, "\n".join(PINS[name])
    mark = target / ".pins"
    if mark.exists() and mark.read_text() == pins:
        return target
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(target), *PINS[name]]
    environment = dict(os.environ, DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise OSError(f"pip install {' '.join(PINS[name])} failed: {done.stderr.strip()[-2000:]}")
    mark.write_text(pins)
    return target


if __name__ == "__main__":
    for name in sys.argv[1:] or PINS:
        print(fetch(name))
