"""`bitshard merge`: adapters into the weights that they were trained on."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from bitshard_cli import calibrated, console
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
    of_text = parser.add_argument_group("calibration of the merged weights (docs/merging.md)")
    of_text.add_argument(
        "--calibrate", metavar="TEXT",
        help="with --to 4bit: choose scales and codes for this text, best the one that was trained on; a dense copy is "
        "beside OUT meanwhile; not for adapters that were trained merge-aware",
    )  # fmt: skip
    calibrated.samples(of_text)
    calibrated.tuning(of_text)
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
    for name in ("merge_aware", "calibrate"):
        if getattr(args, name) and dtype is not None:
            raise console.WrongArgument(
                f"--{name.replace('_', '-')} is for --to 4bit or a format of 4 bits, not {args.to}"
            )
    if args.merge_aware and args.calibrate is not None:
        raise console.WrongArgument("--merge-aware has the bytes of training, --calibrate other ones: name one")
    calibrated.require_sound(args)
    options = {
        "device": args.device, "max_shard_size": args.max_shard_size, "progress": bar,
        "check_progress": console.checking, "quant_type": args.to if args.to in _TYPES else None,
    }  # fmt: skip
    data, lines = {}, []
    if args.calibrate is None:
        count = merge_folder(args.base, args.adapter, args.out, dtype, merge_aware=args.merge_aware, **options)
    else:
        merge_calibrated = console.load("bitshard.calibration.merged").merge_calibrated
        with console.quiet():
            ids = calibrated.of_text(args, args.base)
            count, (_, layers, tuned) = merge_calibrated(
                args.base, args.adapter, args.out, ids, tune_steps=args.tune, seed=args.seed, **calibrated.bars(),
                **options,
            )  # fmt: skip
        data["calibration"], lines = calibrated.report(args, layers, tuned, len(ids))
    text = f"{args.out}: adapters merged into {count} module{'' if count == 1 else 's'}, in {args.to}"
    data |= {"out": str(args.out), "modules": count, "to": args.to}
    return Result(data, "\n".join(map(console.plain, [text, *lines])))
