"""`bitshard merge`: adapters into the weights that they were trained on."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from bitshard_cli import console
from bitshard_cli.console import Result

HELP = "write a base with peft's adapters in its weights, a module at a time"
_DTYPES, _TYPES = ("bfloat16", "float16", "float32"), ("nf4", "fp4", "mxfp4", "nvfp4")
EXAMPLE = "bitshard merge Llama-3-8B-nf4 trained/adapter Llama-3-8B-tuned --to bfloat16"


def arguments(parser: argparse.ArgumentParser) -> None:
    """What is merged, and into what."""
    parser.add_argument("base", type=Path, help="folder of 4-bit weights (what training saw), or of 16-bit ones")
    parser.add_argument("adapter", type=Path, help="folder of peft: LoRA, rsLoRA, DoRA")
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument(
        "--to", choices=(*_DTYPES, "4bit", *_TYPES), default="bfloat16",
        help="dtype of the weights (default: bfloat16), or 4-bit ones as those of the base",
    )  # fmt: skip
    parser.add_argument(
        "--merge-aware", action="store_true",
        help="with --to 4bit: the bytes that training with bitshard.lora.merge_aware has multiplied with",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="that merges (default: cpu)")
    parser.add_argument("--max-shard-size", default="5GB", help="of a file (default: 5GB)")


def bar(numbers: Iterable[int], total: int) -> Iterable[int]:
    """A bar over the tensors."""
    return console.progress(numbers, total=total, unit="tensor", label="Merging")


def run(args: argparse.Namespace) -> Result:
    """Merges, and says how many modules had an adapter."""
    torch = console.load("torch")
    merge_folder = console.load("transformers.modeling_utils", "peft", "bitshard.convert.merge").merge_folder
    console.require_device_and_size(args)
    dtype = getattr(torch, args.to) if args.to in _DTYPES else None
    if args.merge_aware and dtype is not None:
        raise console.WrongArgument(f"--merge-aware is for --to 4bit, nf4 or fp4, not {args.to}")
    count = merge_folder(
        args.base, args.adapter, args.out, dtype, device=args.device, max_shard_size=args.max_shard_size, progress=bar,
        check_progress=console.checking, quant_type=args.to if args.to in _TYPES else None,
        merge_aware=args.merge_aware,
    )  # fmt: skip
    text = f"{args.out}: adapters merged into {count} module{'' if count == 1 else 's'}, in {args.to}"
    return Result({"out": str(args.out), "modules": count, "to": args.to}, text)
