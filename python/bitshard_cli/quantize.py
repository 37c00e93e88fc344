"""`bitshard quantize`: a folder of 16-bit weights into one of 4-bit weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from bitshard_cli import console
from bitshard_cli.console import Result

HELP = "make a folder of 16- or 32-bit weights into one with 4-bit weights, a tensor at a time"
EXAMPLE = "bitshard quantize Qwen3-30B-A3B Qwen3-30B-A3B-nf4 --nested --experts"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of BitsAndBytesConfig, in short, and how files are written."""
    parser.add_argument("folder", type=Path, help="with config.json and safetensors files")
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--type", choices=("nf4", "fp4"), default="nf4", help="of the codes (default: nf4)")
    parser.add_argument("--nested", action="store_true", help="scales in 8 bits (bnb_4bit_use_double_quant)")
    parser.add_argument("--blocksize", type=int, default=64, help="weights per scale of experts (default: 64)")
    parser.add_argument("--storage", default="uint8", help="dtype of the packed bytes (default: uint8)")
    parser.add_argument(
        "--compute-dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="what the config says of products (default: bfloat16)",
    )  # fmt: skip
    parser.add_argument(
        "--skip", nargs="+", default=None, metavar="NAME",
        help="modules that stay as they are, instead of those that transformers leaves out: name the head, too",
    )  # fmt: skip
    parser.add_argument("--experts", action="store_true", help="stacks of experts, too; bitshard reads such a folder")
    parser.add_argument("--device", default="cpu", help="that quantizes (default: cpu)")
    parser.add_argument("--max-shard-size", default="5GB", help="of a file (default: 5GB)")
    parser.add_argument(
        "--consume", action="store_true", help="delete each source file once all that it held is written and read back"
    )


def config_of(args: argparse.Namespace) -> object:
    """The quantization_config."""
    torch = console.load("torch")
    BitsAndBytesConfig = console.load("transformers.modeling_utils", "transformers").BitsAndBytesConfig
    if not isinstance(getattr(torch, args.storage, None), torch.dtype):
        raise console.Mistake(f"--storage {args.storage}: no dtype of torch")
    settings = {
        "bnb_4bit_quant_type": args.type,
        "bnb_4bit_use_double_quant": args.nested,
        "bnb_4bit_quant_storage": args.storage,
        "bnb_4bit_compute_dtype": getattr(torch, args.compute_dtype),
        "llm_int8_skip_modules": args.skip,
    }
    if args.experts:
        from bitshard.transformers import FourBitConfig

        return FourBitConfig(bnb_4bit_blocksize=args.blocksize, **settings)
    if args.blocksize != 64:
        raise console.Mistake("--blocksize is of experts: linear layers of transformers have 64; add --experts")
    return BitsAndBytesConfig(load_in_4bit=True, **settings)


def bar(numbers: Iterable[int], total: int) -> Iterable[int]:
    """A bar over the tensors."""
    return console.progress(numbers, total=total, unit="tensor", label="Quantizing")


def run(args: argparse.Namespace) -> Result:
    """Quantizes, and says what share is 4-bit and what is not."""
    config = config_of(args)
    quantize_folder = console.load("bitshard.convert.quantize").quantize_folder
    with console.quiet():
        report = quantize_folder(
            args.folder, args.out, config, device=args.device, max_shard_size=args.max_shard_size,
            consume=args.consume, progress=bar,
        )  # fmt: skip
    total = report.packed + report.dense
    lines = [
        f"{args.out}: {report.nbytes / 1e9:.2f} GB in {report.files} file{'' if report.files == 1 else 's'}; "
        f"{report.packed:,} of {total:,} elements ({report.packed / total:.1%}) in 4 bits"
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in report.skipped.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"not in 4 bits: {', '.join(names[:3])}{more}: {reason}")
    for name in args.skip or ():
        if not any(name in key for key in report.skipped):
            lines.append(f"--skip {name}: no matrix with that in its name stayed as it was")
    if report.left_out:
        more = f" and {len(report.left_out) - 3} more" if len(report.left_out) > 3 else ""
        lines.append(f"left out, as the model has no place for them: {', '.join(report.left_out[:3])}{more}")
    return Result(report._asdict() | {"out": str(args.out)}, "\n".join(lines))
