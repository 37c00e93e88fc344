"""`bitshard quantize`: a folder of 16-bit weights into one of 4-bit or int8 weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from bitshard_cli import calibrated, console
from bitshard_cli.console import Result

HELP = "make a folder of 16- or 32-bit weights into one with 4-bit or int8 weights, a tensor at a time"
EXAMPLE = "bitshard quantize Qwen3-30B-A3B Qwen3-30B-A3B-nf4 --nested --experts"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: those of BitsAndBytesConfig by short names, and how files are written."""
    parser.add_argument("folder", type=Path, help="with config.json and safetensors files")
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="8: LLM.int8, load_in_8bit (default: 4)")
    parser.add_argument(
        "--type", choices=("nf4", "fp4", "mxfp4", "nvfp4"), default="nf4",
        help="of the codes (default: nf4); bitshard reads mxfp4 and nvfp4, of which stacks of experts are, too",
    )  # fmt: skip
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
    of_text = parser.add_argument_group("calibration (docs/calibration.md)")
    of_text.add_argument(
        "--calibrate", metavar="TEXT",
        help="choose scales and codes for this text: a file, .jsonl, .parquet, a folder, or "
        "a dataset's name",
    )  # fmt: skip
    calibrated.samples(of_text)
    of_text.add_argument(
        "--adapter", type=Path, metavar="FOLDER", help="write an adapter of peft that corrects what is left, too"
    )
    of_text.add_argument("--rank", type=int, help="of that adapter (default: 16)")
    calibrated.tuning(of_text)


def config_of(args: argparse.Namespace) -> object:
    """The quantization_config."""
    torch = console.load("torch")
    BitsAndBytesConfig = console.load("transformers.modeling_utils", "transformers").BitsAndBytesConfig
    if args.bits == 8:
        _require_plain(args)
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=args.skip)
    if not isinstance(getattr(torch, args.storage, None), torch.dtype):
        raise console.WrongArgument(f"--storage {args.storage}: no dtype of torch")
    settings = {
        "bnb_4bit_quant_type": args.type,
        "bnb_4bit_use_double_quant": args.nested,
        "bnb_4bit_quant_storage": args.storage,
        "bnb_4bit_compute_dtype": getattr(torch, args.compute_dtype),
        "llm_int8_skip_modules": args.skip,
    }
    if not console.load("bitshard.kinds").kind_of(args.type).nests:
        if args.blocksize != 64 or args.nested:
            raise console.WrongArgument(
                f"--type {args.type} has blocks and scales of its own: no --blocksize, --nested"
            )
        FourBitConfig = console.load("bitshard.transformers").FourBitConfig
        return FourBitConfig(**settings)
    if args.experts:
        from bitshard.state import BLOCKSIZES
        from bitshard.transformers import FourBitConfig

        if args.blocksize not in BLOCKSIZES:
            raise console.WrongArgument(
                f"--blocksize {args.blocksize}: expected one of {', '.join(map(str, BLOCKSIZES))}"
            )
        return FourBitConfig(bnb_4bit_blocksize=args.blocksize, **settings)
    if args.blocksize != 64:
        raise console.WrongArgument("--blocksize is of experts: linear layers of transformers have 64; add --experts")
    return BitsAndBytesConfig(load_in_4bit=True, **settings)


def _require_plain(args: argparse.Namespace) -> None:
    """WrongArgument where 8 bits are asked for with an option of 4-bit weights."""
    of_four = {
        "--type": args.type != "nf4", "--nested": args.nested, "--blocksize": args.blocksize != 64,
        "--storage": args.storage != "uint8", "--compute-dtype": args.compute_dtype != "bfloat16",
        "--experts": args.experts, "--calibrate": args.calibrate is not None, "--adapter": args.adapter is not None,
    }  # fmt: skip
    given = [name for name, there in of_four.items() if there]
    if given:
        raise console.WrongArgument(f"{given[0]} is of 4-bit weights: leave it out, or --bits 8")


def _require_sound(args: argparse.Namespace) -> None:
    """WrongArgument where options make no sense, or exclude one another."""
    if args.adapter is not None and args.calibrate is None:
        raise console.WrongArgument("--adapter corrects what calibration leaves: add --calibrate TEXT")
    if args.rank is not None and args.adapter is None:
        raise console.WrongArgument("--rank is of an adapter: add --adapter FOLDER")
    if args.rank is not None and args.rank < 1:
        raise console.WrongArgument(f"--rank {args.rank}: expected 1 or more")
    calibrated.require_sound(args)
    console.require_device_and_size(args)


def bar(numbers: Iterable[int], total: int) -> Iterable[int]:
    """A bar over the tensors."""
    return console.progress(numbers, total=total, unit="tensor", label="Quantizing")


def run(args: argparse.Namespace) -> Result:
    """Quantizes, and says what share of the elements that are, and what is not."""
    config = config_of(args)
    _require_sound(args)
    options = {
        "device": args.device, "max_shard_size": args.max_shard_size, "consume": args.consume, "progress": bar,
        "check_progress": console.checking,
    }  # fmt: skip
    layers, tuned = [], None
    with console.quiet():
        if args.calibrate is None:
            quantize_folder = console.load("bitshard.convert.quantize").quantize_folder
            report = quantize_folder(args.folder, args.out, config, **options)
        else:
            (report, layers, tuned), count = _calibrated(args, config, options)
    total = report.packed + report.dense
    lines = [
        f"{args.out}: {console.size(report.nbytes)} in {report.files} file{'' if report.files == 1 else 's'}; "
        f"{report.packed:,} of {total:,} elements ({report.packed / total:.1%}) in {args.bits} bits"
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in report.skipped.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"not in {args.bits} bits: {', '.join(names[:3])}{more}: {reason}")
    for name in args.skip or ():
        if not any(name in key for key in report.skipped):
            lines.append(f"--skip {name}: no matrix with that in its name stayed as it was")
    if report.left_out:
        more = f" and {len(report.left_out) - 3} more" if len(report.left_out) > 3 else ""
        lines.append(f"left out, as the model has no place for them: {', '.join(report.left_out[:3])}{more}")
    data = report._asdict() | {"out": str(args.out)}
    if layers:
        data["calibration"], said = calibrated.report(args, layers, tuned, count)
        lines += said
    return Result(data, "\n".join(map(console.plain, lines)))


def _calibrated(args: argparse.Namespace, config: object, options: dict) -> tuple:
    """What `calibrate_folder` gives, and the number of samples."""
    calibration = console.load("transformers", "bitshard.calibration")
    from bitshard.calibration.folder import require_dense
    from bitshard.convert.output import require_new

    require_new(args.out)
    require_dense(args.folder)
    ids = calibrated.of_text(args, args.folder)
    found = calibration.calibrate_folder(
        args.folder, args.out, config, ids, adapter=args.adapter, rank=args.rank or 16, tune_steps=args.tune,
        seed=args.seed, **calibrated.bars(), **options,
    )  # fmt: skip
    return found, len(ids)
