"""Held-out loss of SmolLM2-135M-Instruct, dense and in 4 bits: what quantization costs in quality.

    python benchmarks/quality.py [--model FOLDER] [--dtype bfloat16] [--only REGEX] [--out benchmarks/results/FILE.md]

Data: the first 16 sequences of 512 tokens of Python's own documentation (`pydoc_data.topics`, joined by blank lines).
Loss: mean next-token cross entropy in nats. The model comes from examples/smollm2.py; its weights were stored in Q4_1
before, so each 4-bit row is a second quantization. Whatever package `import bitsandbytes` finds does the work, so the
same script measures the original with PYTHONPATH set to a folder that holds it.
"""

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from pydoc_data.topics import topics

os.environ["BITSHARD_PLUGIN"] = "0"  # an original bitsandbytes runs its own kernels

import bitsandbytes  # noqa: E402
import torch
import transformers
from timing import cpu_name_and_flags
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

ROOT = Path(__file__).resolve().parents[1]
SEQUENCES, LENGTH = 16, 512
OWN = ("mxfp4", "nvfp4")  # formats that bitsandbytes does not have
# name, 4-bit type, nested scales, bits of the embedding and the head that is tied to it
ROWS = (
    ("dense", None, False, None),
    ("NF4", "nf4", False, None),
    ("NF4, nested scales", "nf4", True, None),
    ("FP4", "fp4", False, None),
    ("FP4, nested scales", "fp4", True, None),
    ("MXFP4", "mxfp4", False, None),
    ("NVFP4", "nvfp4", False, None),
    ("NF4, embedding and head int8", "nf4", False, 8),
    ("NF4, embedding and head NF4", "nf4", False, 4),
    ("NF4, nested scales, embedding and head NF4", "nf4", True, 4),
    ("FP4, embedding and head FP4", "fp4", False, 4),
)


def text_ids(folder: Path) -> torch.Tensor:
    """Tokens of the text, int64 [SEQUENCES, LENGTH]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("\n\n".join(topics.values()), return_tensors="pt", verbose=False).input_ids[0]
    return ids[: SEQUENCES * LENGTH].view(SEQUENCES, LENGTH)


def load(
    folder: Path, dtype: torch.dtype, quant_type: str | None, nested: bool, embedding_bits: int | None = None
) -> torch.nn.Module:
    """The model, its linear layers in 4 bits where `quant_type` names a format; with `embedding_bits` (bitshard only)
    the embedding and the tied head as one quantized weight, else both in `dtype`."""
    config = None
    settings = {"bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": dtype}
    if quant_type in OWN or (quant_type and embedding_bits):
        from bitshard.transformers import FourBitConfig

        config = FourBitConfig(bnb_4bit_quant_type=quant_type, bnb_4bit_embedding_bits=embedding_bits, **settings)
    elif quant_type:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quant_type, **settings)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=config, device_map={"": device}
    ).eval()


def packed_weights(model: torch.nn.Module) -> list[tuple[torch.Tensor, list[torch.Tensor], int]]:
    """(packed bytes, scales, number of weights) of each quantized weight, once."""
    found = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        state, row_scales = getattr(weight, "quant_state", None), getattr(weight, "SCB", None)
        if state is not None:
            scales = [state.absmax, *([state.state2.absmax, state.offset] if state.nested else [])]
            found[id(weight)] = (weight, scales, state.shape.numel())
        elif row_scales is not None:
            found[id(weight)] = (weight, [row_scales], weight.numel())
    return list(found.values())


def n_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bits_per_weight(model: torch.nn.Module) -> float:
    """Bits per quantized weight, scales included; 16 where nothing is quantized."""
    packed = packed_weights(model)
    bits = 8 * sum(n_bytes([weight, *scales]) for weight, scales, _ in packed)
    return bits / sum(count for _, _, count in packed) if packed else 16.0


def mebibytes(model: torch.nn.Module) -> float:
    """MiB of all parameters and scales; what is tied counts once."""
    scales = [scale for _, scales, _ in packed_weights(model) for scale in scales]
    return n_bytes([*model.parameters(), *scales]) / 2**20


@torch.no_grad()
def mean_loss(model: torch.nn.Module, ids: torch.Tensor, batch: int = 1) -> float:
    """Mean next-token loss in nats over `ids`, int64 [sequences, length], `batch` sequences at once."""
    parts = ids.to(model.device).split(batch)
    return sum(model(input_ids=part, labels=part).loss.item() * len(part) for part in parts) / len(ids)


def processor() -> str:
    """Name of the GPU, or of the CPU and its widest vector instructions."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_name_and_flags()[0]} ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"


def main() -> None:
    """Measure all rows; print the table and, with --out, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--only", default="", help="rows whose names this regular expression finds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    ids = text_ids(options.model)
    lines = [
        f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        f"{processor()}, Python {platform.python_version()}, {date.today()}",
        f"`python benchmarks/quality.py {' '.join(sys.argv[1:])}`".replace(f"{ROOT}/", ""),
        "",
        "| weights | bits per quantized weight | MiB of the model | loss | above dense |",
        "|---|---|---|---|---|",
    ]
    dense = None
    for name, quant_type, nested, embedding_bits in ROWS:
        if (embedding_bits or quant_type in OWN) and "+bitshard." not in bitsandbytes.__version__:
            continue
        if not re.search(options.only, name):
            continue
        model = load(options.model, getattr(torch, options.dtype), quant_type, nested, embedding_bits)
        loss = mean_loss(model, ids)
        dense = loss if dense is None else dense
        row = (f"{bits_per_weight(model):.2f}", f"{mebibytes(model):.1f}", f"{loss:.4f}", f"{loss - dense:.4f}")
        lines.append(f"| {name} | {' | '.join(row)} |")
        print(lines[-1], flush=True)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
