"""QLoRA, LoRA, DoRA or full fine-tuning in a plain torch loop, under FSDP1 or FSDP2.

    torchrun --nproc-per-node 2 examples/fsdp_qlora.py --model FOLDER --text FILE --train-type qlora --low-memory
    torchrun --nproc-per-node 2 examples/fsdp_qlora.py --tiny --fsdp 1 --precision mp_bf16_autocast

Train types and precisions have the names and the meaning of Answer.AI's fsdp_qlora. No Trainer and no accelerate: what
is loaded where, what is one unit of FSDP and what is saved stands in this file. It runs on a CPU, too.
"""

import argparse
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import bitsandbytes as bnb
import bitshard.fsdp
import cpu_fsdp
import tiny
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig


@dataclass(frozen=True)
class Precision:
    """What has which dtype."""

    parameters: torch.dtype
    """of everything that is not packed, of the gradients that are summed, and the container of what is packed"""
    compute: torch.dtype
    """of products: in 4-bit layers always, elsewhere where there is autocast"""
    buffers: torch.dtype
    autocast: bool


PRECISIONS = {
    "bf16": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, autocast=False),
    "fp32": Precision(torch.float32, torch.float32, torch.float32, autocast=False),
    "mp_fp16_autocast": Precision(torch.float32, torch.float16, torch.float32, autocast=True),
    "mp_bf16_autocast": Precision(torch.float32, torch.bfloat16, torch.float32, autocast=True),
    "mp_bf16_buffers_autocast": Precision(torch.bfloat16, torch.bfloat16, torch.float32, autocast=True),
}
TRAIN_TYPES = ("full", "lora", "qlora", "dora", "hf_qlora")
CUDA = torch.cuda.is_available()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; `argv` replaces it when the script is called from Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal language model, dense or in 4 bits")
    parser.add_argument("--text", help="UTF-8 text file to train on")
    parser.add_argument("--tiny", action="store_true", help="a made model and text instead, see examples/tiny.py")
    parser.add_argument("--train-type", choices=TRAIN_TYPES, default="qlora", help="hf_qlora: transformers loads it")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--fsdp", type=int, choices=[0, 1, 2], default=2, help="0: one process, to compare with")
    parser.add_argument("--wrap", choices=["transformer", "size"], default="transformer", help="what makes a unit")
    parser.add_argument("--min-params", type=int, default=100_000_000, help="elements of a unit with --wrap size")
    parser.add_argument("--low-memory", action="store_true", help="no rank holds the whole model on its GPU, ever")
    parser.add_argument("--offload", action="store_true", help="keep shards in host memory")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in backward")
    parser.add_argument("--accumulate", type=int, default=1, help="batches to one step of the optimizer")
    parser.add_argument("--batch", type=int, default=1, help="sequences per process and batch")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--max-norm", type=float, default=1.0, help="of the gradient")
    parser.add_argument("--rank", type=int, default=16, help="rank of the LoRA matrices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="folder for what was trained")
    options = parser.parse_args(argv)
    if options.tiny:
        options.model, options.text = tiny.make(Path(tempfile.gettempdir(), "bitshard-tiny"))
    if not (options.model and options.text):
        parser.error("give --model and --text, or --tiny")
    return options


def impossible(options: argparse.Namespace) -> str | None:
    """Why these options cannot work together, in one line; None where they can."""
    world, packed = dist.get_world_size(), is_packed(options)
    storage = PRECISIONS[options.precision].parameters
    if options.fsdp == 0 and (world > 1 or options.low_memory or options.offload):
        return "--fsdp 0 is one process with everything in its memory: no torchrun, no --low-memory, no --offload"
    if packed and options.train_type in ("full", "lora"):
        return f"--train-type {options.train_type} needs dense files, and {options.model} holds 4-bit weights"
    if packed and options.train_type in ("qlora", "dora") and not options.low_memory:
        return "4-bit files are read by --low-memory, or by transformers with --train-type hf_qlora"
    if packed and options.train_type == "hf_qlora" and options.fsdp == 1:
        return f"transformers keeps 4-bit files in their own storage, FSDP1 wants {storage}: use --train-type qlora"
    if options.offload and options.fsdp == 1 and not CUDA:
        return "torch's FSDP1 offloads to host memory from GPUs only"
    return None


# ---- the model ----


def load(options: argparse.Namespace) -> nn.Module:
    """The model with its adapters; with --low-memory under FSDP2 sharded already."""
    torch.manual_seed(options.seed)  # the adapters' random matrices, the same on every process
    if options.train_type == "hf_qlora":
        model = load_with_transformers(options)
    elif not options.low_memory:
        model = load_whole(options)
    elif options.fsdp == 2:
        return load_by_units(options)
    else:
        settings = {"dtype": dtype_of(options), "quantization_config": quantization(options)}
        model = bitshard.fsdp.load_on_rank0(options.model, **settings)
    return model if options.train_type == "full" else with_adapters(model, options)


def with_adapters(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """peft's model, with adapters of the dtype that everything else has: one unit of FSDP1 has one dtype."""
    model = get_peft_model(model, lora(options), autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype_of(options))
    return model


def load_by_units(options: argparse.Namespace) -> nn.Module:
    """Each unit is read, quantized, given its adapters and sharded before the next one is read."""
    return bitshard.fsdp.load(
        options.model,
        dtype=dtype_of(options),
        quantization_config=quantization(options),
        adapters=None if options.train_type == "full" else lora(options),
        units=lambda model: units(model, options),
        **policies(options),
    )


def load_whole(options: argparse.Namespace) -> nn.Module:
    """Every process reads all of it, and quantizes its linear layers one by one."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype_of(options))
    if options.train_type in ("qlora", "dora"):
        quantize(model, options)
    return model.to(device())


def quantize(model: nn.Module, options: argparse.Namespace) -> None:
    """Put 4-bit layers in the places of linear ones, all but the head; quantized on the GPU where weights are there."""
    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or layer is model.get_output_embeddings():
            continue
        with torch.device("meta"):
            new = bnb.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=False,
                compute_dtype=PRECISIONS[options.precision].compute,
                quant_type="nf4",
                quant_storage=dtype_of(options),  # FSDP1 flattens packed bytes and norms into one tensor
            )
        settings = {key: value for key, value in vars(new.weight).items() if key != "requires_grad"}
        new.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, **settings)
        new.bias = layer.bias
        model.set_submodule(name, new if layer.weight.is_meta else new.to(device()))
    model.is_loaded_in_4bit = True  # peft looks for it


def load_with_transformers(options: argparse.Namespace) -> nn.Module:
    """`from_pretrained`; with --low-memory each rank keeps its part (FSDP2), or rank 0 has all of it on the host."""
    one_reads = options.low_memory and options.fsdp == 1
    if one_reads and dist.get_rank() > 0:
        model = without_weights(options)
    else:
        os.environ["BITSHARD_CUT"] = str(int(options.low_memory and options.fsdp == 2))
        model = AutoModelForCausalLM.from_pretrained(
            options.model,
            dtype=dtype_of(options),
            quantization_config=quantization(options),
            device_map={"": "cpu" if one_reads else device()},
        )
        del os.environ["BITSHARD_CUT"]
    if one_reads:
        bitshard.fsdp.send_quant_states(model)
    return model


def without_weights(options: argparse.Namespace) -> nn.Module:
    """The model on the meta device, with 4-bit layers where rank 0 has them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model), dtype=dtype_of(options))
    quantize(model, options)
    return model


def is_packed(options: argparse.Namespace) -> bool:
    """Whether the files hold 4-bit weights."""
    return hasattr(AutoConfig.from_pretrained(options.model), "quantization_config")


def quantization(options: argparse.Namespace) -> BitsAndBytesConfig | None:
    """NF4 with nested scales, kept in the dtype of the parameters; None where nothing is to be quantized."""
    if options.train_type in ("full", "lora") or is_packed(options):
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=PRECISIONS[options.precision].compute,
        bnb_4bit_quant_storage=dtype_of(options),
    )


def lora(options: argparse.Namespace) -> LoraConfig:
    """Adapters on all linear layers but the head."""
    return LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules="all-linear",
        use_dora=options.train_type == "dora",
        task_type="CAUSAL_LM",
    )


def dtype_of(options: argparse.Namespace) -> torch.dtype:
    """Of the parameters."""
    return PRECISIONS[options.precision].parameters


def device() -> torch.device:
    """Where this process computes."""
    return torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")


# ---- sharding ----


def units(model: nn.Module, options: argparse.Namespace) -> list[nn.Module]:
    """The modules that FSDP gathers one at a time, smaller ones first; what is in none is gathered with the model."""
    model = getattr(model, "get_base_model", lambda: model)()
    if options.wrap == "size":
        return by_size(model, options.min_params)[0]
    return [module for module in model.modules() if type(module).__name__ in model._no_split_modules]


def by_size(module: nn.Module, least: int) -> tuple[list[nn.Module], int]:
    """Modules below `module` with `least` elements that are in no smaller unit, and the elements in no unit.

    Linear layers are never units: an adapter reads the weight of its layer outside of that layer's forward.
    """
    found, rest = [], sum(elements(parameter) for parameter in module.parameters(recurse=False))
    for child in module.children():
        if isinstance(child, nn.Linear | BaseTunerLayer):
            rest += sum(elements(parameter) for parameter in child.parameters())
            continue
        inner, left = by_size(child, least)
        found += inner
        if left >= least and not isinstance(child, nn.ModuleList | nn.ModuleDict):  # which have no forward
            found, left = [*found, child], 0
        rest += left
    return found, rest


def elements(parameter: nn.Parameter) -> int:
    """Of a packed weight those that were quantized."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def policies(options: argparse.Namespace) -> dict:
    """FSDP2's arguments. Packed bytes are never cast, whatever the policy says."""
    dtype = dtype_of(options)
    return {
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=CUDA) if options.offload else OffloadPolicy(),
    }


def shard(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """The sharded model."""
    cast_buffers(model, PRECISIONS[options.precision].buffers)
    if options.fsdp == 1:
        return shard_with_fsdp1(model, options)
    if options.fsdp == 2 and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        for unit in units(model, options):
            fully_shard(unit, **policies(options))
        fully_shard(model, **policies(options))
    return model


def shard_with_fsdp1(model: nn.Module, options: argparse.Namespace) -> FullyShardedDataParallel:
    """FSDP1 makes one tensor of a unit, all of it trained or none: each matrix of an adapter is a unit of its own."""
    chosen, dtype = set(units(model, options)), dtype_of(options)

    def is_unit(module: nn.Module) -> bool:
        trained = not list(module.children()) and any(p.requires_grad for p in module.parameters())
        return module in chosen or (trained and options.train_type != "full")

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=is_unit),
        mixed_precision=MixedPrecision(dtype, dtype, PRECISIONS[options.precision].buffers),
        cpu_offload=CPUOffload(options.offload),
        device_id=device(),
        sync_module_states=options.low_memory,  # rank 0 has the weights
        param_init_fn=bitshard.fsdp.materialize if options.low_memory else None,
        use_orig_params=False,
        limit_all_gathers=True,
    )


def cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """FSDP1 does it by its policy, FSDP2 leaves it to us."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


# ---- the loop ----


def batches(options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """This process's batches, int64 [batch, length]; all processes together go through the text once, and again."""
    ids = AutoTokenizer.from_pretrained(options.model)(Path(options.text).read_text(encoding="utf-8"), verbose=False)
    rows = torch.tensor(ids["input_ids"])
    rows = rows[: len(rows) // options.length * options.length].view(-1, options.length)
    if not len(rows):
        sys.exit(f"fsdp_qlora: {options.text} has fewer than --length {options.length} tokens")
    world, rank, number = dist.get_world_size(), dist.get_rank(), 0
    while True:
        first = (number * world + rank) * options.batch
        yield rows[torch.arange(first, first + options.batch) % len(rows)].to(device())
        number += 1


@contextlib.contextmanager
def gradients_summed(model: nn.Module, now: bool) -> Iterator[None]:
    """Let the ranks add up their gradients in this backward, or only each its own."""
    if isinstance(model, FullyShardedDataParallel):
        with contextlib.nullcontext() if now else model.no_sync():
            yield
    else:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(now)
        yield


def step(model: nn.Module, optimizer, scaler, source: Iterator[torch.Tensor], options: argparse.Namespace) -> float:
    """One step of the optimizer; the mean loss of all processes."""
    precision, total = PRECISIONS[options.precision], torch.zeros((), device=device())
    for number in range(options.accumulate):
        ids = next(source)
        with gradients_summed(model, number == options.accumulate - 1):
            with torch.autocast(device().type, precision.compute, enabled=precision.autocast):
                loss = model(input_ids=ids, labels=ids).loss / options.accumulate
            scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(options.max_norm)
    else:
        nn.utils.clip_grad_norm_(parameters, options.max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(options: argparse.Namespace) -> list[float]:
    """Load, shard, train and save; the loss of each step. There must be a process group."""
    reason = impossible(options)
    if reason:
        sys.exit(f"fsdp_qlora: {reason}" if dist.get_rank() == 0 else 1)
    model = load(options)
    model.config.use_cache = False
    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear4bit):  # 4-bit files name a dtype of their own
            layer.compute_dtype = PRECISIONS[options.precision].compute
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = shard(model, options).train()
    report(bitshard.fsdp.describe(model))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    scaler_class = ShardedGradScaler if options.fsdp else torch.amp.GradScaler  # the first takes offloaded gradients
    scaler = scaler_class(device().type, enabled=PRECISIONS[options.precision].compute is torch.float16)
    source, losses = batches(options), []
    with tqdm(total=options.steps, desc="training", disable=dist.get_rank() > 0) as bar:
        for _ in range(options.steps):
            losses.append(step(model, optimizer, scaler, source, options))
            bar.set_postfix(loss=f"{losses[-1]:.4f}")
            bar.update()
    if options.save:
        save(model, options)
    return losses


# ---- saving ----


def trained_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on the CPU) of each parameter that was trained, one unit at a time. A collective."""
    if not isinstance(model, FullyShardedDataParallel):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                yield name, whole.detach().cpu()
        return
    for path, unit in model.named_modules():
        if not isinstance(unit, FullyShardedDataParallel):
            continue
        if not any(parameter.requires_grad for parameter in unit.module.parameters(recurse=False)):  # its flat one
            continue
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            for name, parameter in unit.module.named_parameters():
                if "_flat_param" not in name:  # of a unit inside
                    whole = f"{path}.{name}".replace("_fsdp_wrapped_module.", "").lstrip(".")
                    yield whole.replace("._fsdp_wrapped_module", ""), parameter.detach().cpu().clone()


def save(model: nn.Module, options: argparse.Namespace) -> None:
    """Write what was trained, on rank 0: adapters as peft reads them, a whole model as transformers does."""
    folder, full = Path(options.save), options.train_type == "full"
    tensors = {}
    for name, tensor in trained_tensors(model):
        if dist.get_rank() == 0:
            tensors[name if full else name_in_file(name)] = tensor
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / ("model.safetensors" if full else "adapter_model.safetensors"), {"format": "pt"})
        if full:
            AutoConfig.from_pretrained(options.model).save_pretrained(folder)
        else:
            model.peft_config["default"].save_pretrained(folder)
    dist.barrier()


def name_in_file(name: str) -> str:
    """Of an adapter's tensor, as peft saves it."""
    name = name.removeprefix("base_model.model.").replace(".default", "")
    return "base_model.model." + name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def report(line: str) -> None:
    """Say something on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def join() -> None:
    """Join the process group that torchrun describes, or one of one process."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("MASTER_ADDR", "localhost")):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_PORT", "29511")
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        cpu_fsdp.send_states()
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")  # norms of offloaded gradients meet on the CPU


def main() -> None:
    """Train in the group that `join` joins."""
    options = parse()  # before there is a group, in which rank 0 alone would write the tiny model
    join()
    losses = train(options)
    report(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    cpu_fsdp.leave()


if __name__ == "__main__":
    main()
