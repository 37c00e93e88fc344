"""`bitshard plan`: will this train?"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from bitshard_cli import console
from bitshard_cli.console import Result, WrongArgument

HELP = "will this train: memory of each GPU by parts, while loading and in a step, and what would make it fit"
EXAMPLE = "bitshard plan qwen2.5-32b --gpus 2x24 --seq 2048 --nested --lora-rank 16"
OFFLOADS = ("weights", "activations")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The job."""
    parser.add_argument("model", help="a config.json, a folder with one, or a known name such as llama-3-8b")
    parser.add_argument("--gpus", default="1x24", metavar="NxGIB", help="how many GPUs of how many GiB (default: 1x24)")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence (default: 2048)")
    parser.add_argument("--batch", type=int, default=1, help="sequences on each GPU at a time (default: 1)")
    lora = parser.add_argument_group("adapters")
    lora.add_argument("--lora-rank", type=int, default=16, help="(default: 16)")
    lora.add_argument("--lora-dtype", choices=("float32", "bfloat16"), default="float32", help="peft's own is float32")
    lora.add_argument(
        "--targets", default="all-linear", help="names of layers with commas between (default: all-linear)"
    )
    lora.add_argument("--lora-experts", action="store_true", help="on stacks of experts, too")
    lora.add_argument("--optimizer", default="adamw_torch", help="as in TrainingArguments, such as adamw_8bit")
    parser.add_argument("--load-in-8bit", action="store_true", help="linear layers of LLM.int8 instead of 4-bit ones")
    four = parser.add_argument_group("4-bit weights")
    four.add_argument("--type", choices=("nf4", "fp4", "mxfp4", "nvfp4"), default="nf4", help="(default: nf4)")
    four.add_argument("--nested", action="store_true", help="bnb_4bit_use_double_quant")
    four.add_argument("--experts", action="store_true", help="stacks of experts are 4-bit, too")
    four.add_argument("--head-4bit", action="store_true", help="so is the head")
    four.add_argument("--skip", action="append", default=[], metavar="NAME", help="a module that stays in 16 bits")
    step = parser.add_argument_group("sharding and memory")
    step.add_argument("--fsdp", choices=("1", "2"), default="2", help="version, for more than one GPU (default: 2)")
    step.add_argument("--load", choices=("auto", "whole", "parts", "native"), default="auto", help="see docs/plan.md")
    step.add_argument("--gather-in-place", action="store_true", help="bitshard.fsdp.gather_in_place")
    step.add_argument("--loss-chunk", type=int, default=0, metavar="TOKENS", help="whose logits exist at a time")
    step.add_argument("--no-checkpointing", action="store_true", help="of gradients")
    step.add_argument("--offload", default="", help=f"to the host: {', '.join(OFFLOADS)}, or both with a comma")
    _time_arguments(parser.add_argument_group("time of a step"))
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write stacked bars there (.png, .svg, .pdf)")


def _time_arguments(group: Any) -> None:
    group.add_argument("--time", metavar="CARD", help="H100, 4090, ..., or sm=89,sms=142,gb=864,tflops=362")
    group.add_argument("--link", help="between GPUs: nvlink4, pcie4, host4 (through the host), ..., or GB/s")
    group.add_argument("--replicas", type=int, default=1, metavar="N", help="groups of --gpus (HSDP, DDP; default: 1)")
    group.add_argument("--across", metavar="LINK", help="between replicas (default: as --link)")
    group.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches a step (default: 1)")
    group.add_argument("--eager", action="store_true", help="without graphs: the host launches each kernel")
    group.add_argument("--peft-layers", action="store_true", help="adapters by peft, without BITSHARD_FUSE")
    group.add_argument("--host-us", type=float, metavar="US", help="of the host for a kernel (default: as measured)")


def way_of(args: argparse.Namespace) -> dict[str, Any]:
    """How the step is run: fields of `bitshard.planning.time.Way`. WrongArgument for options without --time."""
    found = dict(
        graphs=not args.eager, fused=not args.peft_layers, accumulate=args.accumulate, replicas=args.replicas,
        link=args.link, across=args.across, host_us=args.host_us,
    )  # fmt: skip
    default = dict(graphs=True, fused=True, accumulate=1, replicas=1, link=None, across=None, host_us=None)
    if args.time is None and found != default:
        changed = ", ".join(sorted(name for name in found if found[name] != default[name]))
        raise WrongArgument(f"{changed}: of the time of a step, which --time CARD asks for")
    return found


def job_of(args: argparse.Namespace) -> dict[str, Any]:
    """The job that was asked for: fields of `bitshard.planning.Job`."""
    found = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)", args.gpus)
    if not found:
        raise WrongArgument(f"--gpus {args.gpus}: expected a number of GPUs and GiB, such as 2x24")
    offload = [word for word in args.offload.split(",") if word]
    unknown = [word for word in offload if word not in OFFLOADS]
    if unknown:
        raise WrongArgument(f"--offload {unknown[0]}: expected {' or '.join(OFFLOADS)}")
    kind = console.load("torch", "bitshard.kinds").kind_of(args.type)
    if args.nested and not kind.nests:
        raise WrongArgument(f"--nested: the scales of {args.type} have 8 bits already")
    gpus = int(found[1] or 1)
    return dict(
        gpus=gpus, gib=float(found[2]), seq=args.seq, batch=args.batch, rank=args.lora_rank,
        targets="all-linear" if args.targets == "all-linear" else tuple(args.targets.split(",")),
        lora_experts=args.lora_experts, lora_dtype=args.lora_dtype, optimizer=args.optimizer,
        sharding=f"fsdp{args.fsdp}" if gpus > 1 else "none", load=args.load,
        vocabulary="in_place" if args.gather_in_place else "gathered", loss_chunk=args.loss_chunk,
        checkpointing=not args.no_checkpointing, offload_weights="weights" in offload,
        offload_activations="activations" in offload, bits=8 if args.load_in_8bit else 4,
        experts_4bit=args.experts, head_4bit=args.head_4bit, skip=tuple(args.skip),
        nested=args.nested or not kind.nests, blocksize=kind.blocksize,
    )  # fmt: skip


def run(args: argparse.Namespace) -> Result:
    """Plans; status 0 also where it does not fit: that is an answer."""
    job, way = job_of(args), way_of(args)
    planning = console.load("torch", "transformers.modeling_utils", "bitshard.planning")
    text = console.load("bitshard.planning.text")
    with console.of_arguments():
        wanted = planning.Job(**job).checked()
    found = planning.plan(args.model, wanted)
    timed = _timed(found, args.time, way) if args.time is not None else None
    if args.picture:
        text.picture(found, args.picture)
    if timed is None:
        return Result(text.data(found), text.text(found))
    words = console.load("bitshard.planning.time_text")
    return Result(text.data(found) | {"time": words.data(timed)}, f"{text.text(found)}\n\n{words.text(timed)}")


def _timed(plan: Any, card: str, way: dict[str, Any]) -> Any:
    time = console.load("bitshard.planning.time")
    with console.of_arguments():
        return time.Time(plan, card, time.Way(**way))
