"""What the FSDP worker scripts share: start-up, weights whose packed words are hostile, and byte comparisons."""

import argparse
import contextlib
import datetime
import functools
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from bitshard import ops, tensor
from bitshard.kinds import kind_of
from bitshard.nn.linear import Linear4bit
from bitshard.nn.linear8bit import Linear8bitLt
from bitshard.shards.shard import PackedShard
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

sys.path.append(str(Path(__file__).parents[1]))  # a worker starts in this folder, and helpers/ is beside it
from helpers.bytes import as_bytes, same_bytes, wrong_bytes  # noqa: E402, F401

STORAGES = {"uint8": torch.uint8, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PARAM_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BASE_DTYPE = torch.bfloat16
SIGNAL = "FSDP_CPU_RAM_EFFICIENT_LOADING"  # which TrainingArguments(fsdp=...) sets, to true or false
EVEN = (96, 64)  # 3072 packed bytes and 96 scales: whole elements on 1, 2 and 3 ranks in every dtype
UNEVEN = (35, 33)  # 578 packed bytes (289 or 145 elements), 19 scales: never even on 2 or 3 ranks


def start() -> tuple[torch.device, argparse.Namespace]:
    """Join the process group (NCCL for tensors on GPUs, gloo for others) and read the options; this process shards."""
    os.environ[SIGNAL] = "false"
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", help="JSON result file, written by rank 0")
    parser.add_argument("--only", default="", help="comma-separated names of checks or of files of checks; else all")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="folder for checkpoints, shared by the ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = datetime.timedelta(seconds=int(os.environ.get("BITSHARD_TEST_TIMEOUT", 60)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    return here(), args


def here() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def finish(results: dict, args: argparse.Namespace) -> None:
    """Rank 0 writes the results of all ranks; everybody leaves.

    At once, without the interpreter's shutdown: there gloo's thread, which still owns the last collective's tensors,
    can ask for the GIL and abort the process (torch 2.13; seen with a plain `nn.Linear` too).
    """
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0 and args.out:
        with open(args.out, "w") as file:
            json.dump({"world": dist.get_world_size(), "torch": torch.__version__, "ranks": everyone}, file, indent=1)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def hostile_values(n: int, k: int, dtype: torch.dtype, seed: int = 0, quant_type: str = "nf4") -> torch.Tensor:
    """[n, k] whose 4-bit bytes are random, with a run of 0xFF and of 0x7F81 at the start, and whose scales differ.

    As bfloat16 and float16 words many of the bytes are NaNs, signalling ones included, which only byte copies keep.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n * k,), generator=generator)
    codes[:128] = 15
    codes[128:256] = torch.tensor([8, 1, 7, 15]).repeat(32)
    block = kind_of(quant_type).blocksize
    codes[::block] = 15  # the largest code in each block, so that quantizing gives these codes again
    scales = 0.5 + torch.rand(-(-n * k // block), generator=generator)
    if quant_type != "nf4":
        scales = torch.exp2((8 * scales).floor())  # which 8-bit floats have
    return (ops.table(quant_type)[codes] * scales.repeat_interleave(block)[: n * k]).view(n, k).to(dtype)


class Block(nn.Module):
    """A 4-bit linear with a small trainable branch beside it, as LoRA makes it."""

    def __init__(
        self, n: int, k: int, dtype: torch.dtype, storage: torch.dtype, device: torch.device, seed: int = 0,
        quant_type: str = "nf4",
    ):  # fmt: skip
        super().__init__()
        settings = {"compress_statistics": True, "quant_type": quant_type, "quant_storage": storage}
        self.base = Linear4bit(k, n, bias=False, compute_dtype=dtype, **settings)
        values = hostile_values(n, k, dtype, seed, quant_type)
        self.base.weight = tensor.Params4bit(values, **settings, module=self.base)
        self.base.weight = self.base.weight.to(device)
        generator = torch.Generator().manual_seed(seed + 1)
        self.down = nn.Parameter(torch.randn(k, 4, generator=generator).to(device, dtype) * 0.1)
        self.up = nn.Parameter(torch.randn(4, n, generator=generator).to(device, dtype) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x.to(self.down.dtype) @ self.down @ self.up).to(x.dtype)


def shard_fsdp1(model, param_dtype, device, **options):
    wrap = functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, (Linear4bit, Linear8bitLt))
    )
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=wrap,
        mixed_precision=MixedPrecision(param_dtype=param_dtype) if param_dtype else None,
        device_id=device,
        **{"sharding_strategy": ShardingStrategy.FULL_SHARD, "use_orig_params": False, **options},
    )


def kept_scales(layer: Linear4bit) -> torch.Tensor:
    """The first-level scales that this rank keeps between forwards: its chunk, padded, or all where they are whole."""
    state = layer.quant_state
    return state.absmax if state.sharded is None else state.sharded.scales


def whole_bytes(layer: Linear4bit) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the packed weight and of its scales; of a weight loaded in parts a collective.

    The parts are those of what was quantized, by the checksum that was taken of it.
    """
    weight, state = layer.weight, layer.quant_state
    if state.part is not None:
        weight, state = state.part.gathered()
        assert int(ops.checksum(weight)) == int(layer.quant_state.checksum)
        assert int(ops.checksum(state.absmax)) == int(layer.quant_state.sharded.checksum)
    return as_bytes(weight), as_bytes(state.absmax)


class Spy:
    """Compares what a `Linear4bit` sees in forward, byte by byte, with what it was quantized to."""

    def __init__(self, layer: Linear4bit):
        self.weight, self.scales = whole_bytes(layer)
        self.weight_dtype = layer.weight.dtype
        self.seen: list[tuple[int, int]] = []
        layer.register_forward_hook(self.look)

    def look(self, layer: Linear4bit, args: tuple, output: torch.Tensor) -> None:
        """After the layer's forward: (wrong weight bytes, wrong scale bytes)."""
        self.seen.append(
            (
                wrong_bytes(layer.weight, self.weight),
                wrong_bytes(layer.quant_state.absmax, self.scales),
            )
        )

    def wrong(self) -> list[int]:
        """The largest counts of all forwards; -1 where a size differed."""
        return [max((abs(counts[i]) for counts in self.seen), default=-1) for i in (0, 1)]


@contextlib.contextmanager
def gathered_dtypes():
    """The dtypes that PackedShard's hook hands to the collective, while this is open."""
    hook, dtypes = PackedShard.fsdp_pre_all_gather, set()

    def spy(self, mesh):
        inputs, metadata = hook.__get__(self)(mesh)
        dtypes.update(data.dtype for data in inputs)
        return inputs, metadata

    PackedShard.fsdp_pre_all_gather = spy
    try:
        yield dtypes
    finally:
        PackedShard.fsdp_pre_all_gather = hook


# uint8, or where FSDP2 of this torch does not shard it another container than that of a model in float32
BYTES = torch.uint8 if tensor._FSDP2_TAKES_INTEGERS else torch.bfloat16


@contextlib.contextmanager
def no_launch():
    """As in a process that nothing has told to shard: integer storage stays integer."""
    names = (SIGNAL, "ACCELERATE_USE_FSDP")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def plant(words: torch.Tensor) -> None:
    """Change one packed word in 1,000, at least one, in place: the fault that every comparison must see."""
    words.view(-1).view(torch.uint8).view(-1, words.element_size())[::1000] ^= 0x88
