"""QLoRA of gpt-oss-120b's shape under FSDP2 on two GPUs: peaks of loading and training, step time, losses.

    python benchmarks/experts_sharded.py make DIR [--type mxfp4]      # 62 GB of random weights, in nested NF4 or MXFP4
    python benchmarks/experts_sharded.py train DIR --cap 47 [--type mxfp4] [--save] [--one-card] --out RESULTS

`make` writes pre-quantized files, a decoder layer each, as `save_pretrained` would. `train` is one launch of --ranks
processes: transformers' `distributed_config` lets each rank read its part, then peft's adapters on attention and
experts in bfloat16, fused, `AdamW8bit`, gradient checkpointing, random tokens, 1 x --tokens a rank. The result is
RESULTS/NAME.json and a table. --one-card: all ranks share one GPU, each under its own --cap, and gloo carries what
they exchange through the host. The memory of a rank is what it is on a GPU of its own; the seconds are not. --layers,
--experts and --hidden make smaller shapes, and without a GPU all runs on the CPU. --type mxfp4: files as gpt-oss is
published, experts in MXFP4 and the rest in bfloat16, which keep their bytes; --save writes the trained model's base
beside them and compares all bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import loading

NAME = "gpt-oss-120b"


# ---- the files ------------------------------------------------------------------------------------------------------


def shape(options: argparse.Namespace):
    """The published config, or a smaller one."""
    from bitshard.planning.model import config_of

    config = config_of(NAME)
    config.num_hidden_layers = options.layers or config.num_hidden_layers
    config.layer_types = config.layer_types[: config.num_hidden_layers]
    config.num_local_experts = options.experts or config.num_local_experts
    if options.hidden:
        config.hidden_size = config.intermediate_size = options.hidden
        config.num_attention_heads, config.num_key_value_heads, config.vocab_size = 4, 2, 8 * options.hidden
    config.architectures, config.dtype = ["GptOssForCausalLM"], "bfloat16"
    return config


def fill(module, device: str) -> None:
    """Random values for what is on the meta device, of the deviation of a new model."""
    import torch

    module.to_empty(device=device)
    for name, parameter in module.named_parameters():
        norm = name.endswith("norm.weight")
        parameter.data.fill_(1) if norm else parameter.data.normal_(0, 0.02)
    assert all(parameter.dtype is torch.bfloat16 for parameter in module.parameters())


def mxfp4(entries: dict, device: str) -> dict:
    """The entries of a file with random MXFP4 stacks in the place of dense ones [E, K, N]; scales of 2^-9 to 2^-6."""
    import torch

    made = {}
    for name, value in entries.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made[name] = value.cpu().contiguous()
            continue
        E, K, N = value.shape
        made[f"{name}_blocks"] = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8, device=device).cpu()
        made[f"{name}_scales"] = torch.randint(118, 122, (E, N, K // 32), dtype=torch.uint8, device=device).cpu()
    return made


def decoder_layer(config, index: int, device: str, type: str) -> dict:
    """The entries of a file for one decoder layer, on the CPU: experts and attention in nested NF4, or as gpt-oss's."""
    import experts_step
    import torch
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer

    torch.manual_seed(index)
    with torch.device("meta"):
        layer = GptOssDecoderLayer(config, index).to(torch.bfloat16)
    prefix = f"model.layers.{index}."
    if type == "mxfp4":
        stacks = {name: value for name, value in layer.state_dict().items() if value.dim() == 3}
        for name in stacks:
            layer.mlp.experts.register_parameter(name.rpartition(".")[2], None)
        fill(layer, device)
        return mxfp4({prefix + name: value for name, value in (stacks | layer.state_dict()).items()}, device)
    fill(layer, device)
    experts_step.quantize(layer, device)
    return {prefix + name: value.cpu().contiguous() for name, value in layer.state_dict().items()}


def ends(config, device: str) -> dict:
    """The entries of embeddings, head and last norm."""
    import torch

    torch.manual_seed(config.num_hidden_layers)
    size = (config.vocab_size, config.hidden_size)
    entries = {
        name: torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, 0.02).cpu()
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    return entries | {"model.norm.weight": torch.ones(config.hidden_size, dtype=torch.bfloat16)}


def make(options: argparse.Namespace) -> None:
    """Write DIR: config.json, the files and their index."""
    import torch
    from bitshard.transformers import FourBitConfig
    from safetensors.torch import save_file

    folder, config, started = Path(options.directory), shape(options), time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    names, total = {}, 0
    for index in range(config.num_hidden_layers + 1):
        last = index == config.num_hidden_layers
        entries = ends(config, device) if last else decoder_layer(config, index, device, options.type)
        file = f"model-{index + 1:05d}-of-{config.num_hidden_layers + 1:05d}.safetensors"
        save_file(entries, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(entries, file)
        total += (folder / file).stat().st_size
        print(f"{file}: {total / loading.GIB:.2f} GiB in {time.perf_counter() - started:.0f} s", flush=True)
    settings = FourBitConfig(
        bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    method = {"quant_method": "mxfp4"} if options.type == "mxfp4" else settings.to_dict()
    text = config.to_dict() | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(text, indent=2))
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# ---- one rank -------------------------------------------------------------------------------------------------------


def start(options: argparse.Namespace) -> None:
    """The process group: NCCL with a GPU a rank, gloo on one card or on the CPU."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() and not options.one_card else "gloo")


def build(options: argparse.Namespace, record: loading.Record):
    """The sharded model with its adapters, and the optimizer."""
    import bitsandbytes as bnb
    import torch
    from bitshard import graphs, lora
    from bitshard.fsdp import shard_adapters
    from bitshard.transformers import FourBitConfig, dense_config
    from experts_step import ATTENTION, STACKS
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with record.phase("load"):
        settings = {"distributed_config": DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))}
        if options.type == "mxfp4":
            kept = FourBitConfig(bnb_4bit_quant_type="mxfp4", bnb_4bit_compute_dtype=torch.bfloat16)
            settings |= {"config": dense_config(options.directory), "quantization_config": kept}
        model = AutoModelForCausalLM.from_pretrained(
            options.directory, dtype="bfloat16", attn_implementation=options.attention, **settings
        )
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with record.phase("prepare"):
        torch.manual_seed(0)  # the same adapters on every rank
        adapters = LoraConfig(r=options.rank, target_modules=ATTENTION, target_parameters=STACKS, task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
        if options.ranks > 1:
            shard_adapters(model)
        record.values["fused"] = str(lora.fuse(model))
        optimizer = bnb.optim.AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        if options.graphs:
            graphs.enable(model)
    return model.train(), optimizer


def rank(options: argparse.Namespace) -> None:
    """What every process of `train` does."""
    if options.one_card:
        os.environ["LOCAL_RANK"] = "0"
    import torch
    import transformers
    from transformers import AutoConfig

    start(options)
    loading.synchronize()
    record = loading.Record(options.record)
    record.values.update(transformers=transformers.__version__, losses=[], options=vars(options))
    if options.cap and record.cuda:
        loading.cap_gpu(options.cap)
    config = AutoConfig.from_pretrained(options.directory)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    ids = torch.randint(0, config.vocab_size, (1, options.tokens), generator=generator)
    ids = ids.to("cuda" if record.cuda else "cpu")
    try:
        model, optimizer = build(options, record)
        record.values["described"] = loading.described(model)
        say(record, "prepare")
        for number in range(options.steps):
            with record.phase(f"step {number + 1}"):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                record.values["losses"].append(loss.item())
            say(record, f"step {number + 1}")
        if options.graphs:
            from bitshard import graphs

            print(graphs.report(model), flush=True)
            graphs.disable(model)
        if options.save:
            with record.phase("save"):
                save(model, options)
            say(record, "save")
    except Exception as error:
        record.write()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        loading.end_of_rank(1)
    record.write()
    loading.end_of_rank()


def save(model, options: argparse.Namespace) -> None:
    """Write the base model and compare: every tensor of the files must be there again with its bytes."""
    import torch
    import torch.distributed as dist
    from bitshard import fsdp
    from bitshard.sharding.checkpoints.reading import Checkpoint

    folder = Path(options.out) / "saved"
    fsdp.save_pretrained(model, folder, progress=False)
    dist.barrier()
    if dist.get_rank():
        return
    found, wanted = Checkpoint(folder), Checkpoint(options.directory)
    wrong = set(found.files) ^ set(wanted.files)
    count = 0
    for name in wanted.files.keys() & found.files.keys():
        read = [each.read(name).reshape(-1).view(torch.uint8) for each in (found, wanted)]
        count += read[1].numel()
        if read[0].shape != read[1].shape or not read[0].equal(read[1]):
            wrong.add(name)
    print(f"saved: {count:,} bytes of {len(wanted.files)} tensors compared, {len(wrong)} tensors differ", flush=True)
    assert not wrong, sorted(wrong)[:5]


def say(record: loading.Record, name: str) -> None:
    """A line of the log."""
    values = record.values["phases"][name]
    text = ", ".join(f"{key} {value:.2f}" for key, value in values.items() if not key.startswith("host"))
    print(f"rank {record.values['rank']} {name}: {text}, losses {record.values['losses'][-1:]}", flush=True)


# ---- one launch -----------------------------------------------------------------------------------------------------

HEAD = """| run | load: peak, reserved | prepare: peak, reserved | step: peak, reserved | load s | step s | losses |
|---|---|---|---|---|---|---|"""


def row(result: dict) -> str:
    """A line of the table: the largest number of all ranks, GiB."""
    phases = [phase for one in result["ranks"] for phase in one["phases"].items()]

    def most(start: str, *keys: str) -> str:
        found = [[phase[key] for name, phase in phases if name.startswith(start) and key in phase] for key in keys]
        return ", ".join(f"{max(values):.2f}" if values else "-" for values in found)

    cells = [most(name, "allocated_peak", "reserved_peak") for name in ("load", "prepare", "step")]
    cells += [most("load", "seconds"), most("step", "seconds")]
    losses = ["; ".join(", ".join(f"{loss:.4f}" for loss in one["losses"]) for one in result["ranks"])]
    failed = f" **{result['error']}**" if result["error"] else ""
    return f"| {result['name']}{failed} | " + " | ".join(cells + losses) + " |"


def train(options: argparse.Namespace) -> None:
    """One launch, its JSON file and its row."""
    out = Path(options.out)
    name = (
        f"{options.ranks}x{options.tokens}-r{options.rank}"
        + "-one-card" * options.one_card
        + "-graphs" * options.graphs
        + (f"-{options.attention}" if options.attention else "")
        + (f"-{options.type}" if options.type != "nf4" else "")
    )
    command = loading.launcher(False, options.ranks, out)
    command += [__file__, "rank", *sys.argv[2:], "--record", str(out / f"{name}.rank")]
    error = loading.launch(command, out / f"{name}.log", options.timeout)
    print(HEAD, row(loading.collect(out, name, error)), sep="\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in (("make", make), ("train", train), ("rank", rank)):
        command = commands.add_parser(name)
        command.set_defaults(does=does)
        command.add_argument("directory")
        command.add_argument("--type", choices=("nf4", "mxfp4"), default="nf4", help="of the experts (default: nf4)")
        if name == "make":
            for sizes in ("--layers", "--experts", "--hidden"):
                command.add_argument(sizes, type=int)
            continue
        command.add_argument("--ranks", type=int, default=2)
        command.add_argument("--tokens", type=int, default=2048, help="of the sequence of a rank")
        command.add_argument("--rank", type=int, default=8, help="of the adapters")
        command.add_argument("--steps", type=int, default=4)
        command.add_argument("--cap", type=float, default=0, help="GiB that torch may reserve for a rank")
        command.add_argument("--one-card", action="store_true", help="all ranks on one GPU, through gloo")
        command.add_argument("--save", action="store_true", help="the base, behind the last step, and compare it")
        command.add_argument("--graphs", action="store_true", help="bitshard.graphs.enable")
        command.add_argument("--attention", help="attn_implementation; transformers chooses eager for gpt-oss")
        command.add_argument("--out", default="experts-sharded-results")
        command.add_argument("--timeout", type=float, default=500, help="seconds of the launch")
        if name == "rank":
            command.add_argument("--record", required=True)
    options = parser.parse_args()
    if options.command == "rank":
        options.record += os.environ["RANK"] + ".json"
    does = vars(options).pop("does")
    does(options)


if __name__ == "__main__":
    main()
