"""QLoRA of a 70B model on GPUs of 24 GB: does it fit, how much of what, how fast.

    python benchmarks/llama70b.py make DIR                                # 40 GiB of random weights in nested NF4
    python benchmarks/llama70b.py train DIR --load native --tokens 512 --cap 23.5 --out RESULTS

Shape of Llama-3-70B, LoRA of rank 16 on all linear layers, gradient checkpointing, AdamW, random tokens, the default
settings of torch's allocator. What it takes on paper: `bitshard plan llama-3-70b`. --load says who shards the model:
`native` is transformers' `distributed_config` under torchrun, `cut` accelerate's FSDP2, `layerwise` a loop that shards
layer by layer, which works with upstream too (--package FOLDER) where nothing else loads. --cap makes larger GPUs pass
for smaller ones (see loading.py).

Each `train` is one launch of --ranks processes and leaves RESULTS/NAME.json; without a GPU it runs on the CPU
(`make --shape tiny`). With --snapshot a file tells how the allocator's memory lay when most of it was in use.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import loading
import snapshot

LORA = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


# ---- the model ------------------------------------------------------------------------------------------------------


def load_native(options: argparse.Namespace):
    """Every rank reads its rows of each weight."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    if options.vocabulary != "gathered":  # a unit of its own, so that the last norm can be gathered without the head
        LlamaForCausalLM._fsdp_plan = {"lm_head": "free_full_weight"}
    return AutoModelForCausalLM.from_pretrained(
        options.folder,
        dtype="bfloat16",
        distributed_config=DistributedConfig(
            fsdp_size=int(os.environ["WORLD_SIZE"]), fsdp_cpu_offload=options.offload_weights
        ),
    )


def load_cut(options: argparse.Namespace):
    """Every rank reads each weight and keeps its part; accelerate shards later."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(options.folder, dtype="bfloat16")


def add_adapters(model, dtype):
    """peft's adapters in `dtype`; they are the same on every rank."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(**LORA))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def load_layerwise(options: argparse.Namespace, dtype):
    """Read, adapt and shard one layer at a time, with calls that upstream has too. Returns the sharded model."""
    import bitsandbytes as bnb
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from safetensors import safe_open
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    config = AutoConfig.from_pretrained(options.folder)
    del config.quantization_config
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.model.rotary_emb = LlamaRotaryEmbedding(config=config).to(device)
    model.requires_grad_(False)
    model.is_loaded_in_4bit = True
    files = json.loads(Path(options.folder, "model.safetensors.index.json").read_text())["weight_map"]

    def read(prefix: str) -> dict:
        """Tensors whose names start with `prefix`, without it, on the device."""
        found = {}
        for file in sorted({file for name, file in files.items() if name.startswith(prefix)}):
            with safe_open(Path(options.folder, file), "pt") as tensors:
                for name in tensors.keys():
                    if name.startswith(prefix):
                        found[name.removeprefix(prefix)] = tensors.get_tensor(name).to(device)
        return found

    def linear(entries: dict, shape):
        """A 4-bit layer of packed bytes in a bfloat16 container, in which FSDP2 shards upstream's weights too."""
        layer = bnb.nn.Linear4bit(
            shape[1], shape[0], False, torch.bfloat16, quant_type="nf4", quant_storage=torch.bfloat16, device="meta"
        )
        packed = entries.pop("weight").view(-1).view(torch.bfloat16).view(-1, 1)
        stats = {name.removeprefix("weight."): value for name, value in entries.items()}
        layer.weight = bnb.nn.Params4bit.from_prequantized(packed, stats, device=device, module=layer)
        layer.quant_state = layer.weight.quant_state
        return layer

    policy = {"offload_policy": CPUOffloadPolicy() if options.offload_weights else OffloadPolicy()}
    lora = LoraConfig(**{**LORA, "target_modules": NAMES})
    torch.manual_seed(0)
    for number, layer in enumerate(model.model.layers):
        entries = read(f"model.layers.{number}.")
        for name, module in list(layer.named_modules()):
            if type(module) is torch.nn.Linear:
                own = {key.removeprefix(f"{name}."): entries[key] for key in entries if key.startswith(f"{name}.")}
                layer.set_submodule(name, linear(own, module.weight.shape))
            elif f"{name}.weight" in entries:
                module.weight = torch.nn.Parameter(entries[f"{name}.weight"], requires_grad=False)
        layer.is_loaded_in_4bit = True
        inject_adapter_in_model(lora, layer)
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(device, dtype)
        fully_shard(layer, reshard_after_forward=True, **policy)
    for name, unit in (("model.embed_tokens", "embedding"), ("lm_head", "tail"), ("model.norm", "tail")):
        weight = read(f"{name}.")["weight"]
        model.get_submodule(name).weight = torch.nn.Parameter(weight, requires_grad=False)
        if unit == "embedding":
            fully_shard(model.get_submodule(name), reshard_after_forward=True, **policy)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **policy)
    return fully_shard(model, **policy)


# ---- the loss -------------------------------------------------------------------------------------------------------


class ChunkedHead:
    """In the place of the head's forward, while FSDP2 has its weight whole: the mean loss instead of logits, which
    exist for `size` tokens at a time. The model's own loss is what the head gives."""

    def __init__(self, base, size: int):
        self.logits, self.forward, self.size, self.labels = base.lm_head.forward, base.forward, size, None
        base.lm_head.forward, base.forward = self.loss, self.with_labels
        base.loss_function = lambda logits, labels, **_: logits

    def with_labels(self, *args, labels, **kwargs):
        self.labels = labels
        return self.forward(*args, labels=labels, **kwargs)

    def loss(self, hidden):
        from torch.utils.checkpoint import checkpoint

        hidden, labels = hidden[:, :-1].flatten(0, 1), self.labels[:, 1:].flatten()
        total = 0
        for some, targets in zip(hidden.split(self.size), labels.split(self.size), strict=True):
            total = total + checkpoint(self.summed, some, targets, use_reentrant=False)
        return total / labels.numel()

    def summed(self, hidden, labels):
        from torch.nn import functional

        return functional.cross_entropy(self.logits(hidden).float(), labels, reduction="sum")


def split_vocabulary(base, size: int):
    """Let no rank gather the embeddings [V, H] or the head [V, H]: tokens go to the rows instead of rows to tokens.

    Each rank looks up, and scores, the tokens of all ranks in its own V / N rows. What travels are hidden states
    [tokens, H] in the place of two matrices of V x H. The model has its loss, and hidden states for logits.
    """
    import torch
    import torch.distributed as dist

    group = base.lm_head.weight.device_mesh.get_group()  # FSDP2's own: one communicator, one order of collectives
    world, rank = dist.get_world_size(group), dist.get_rank(group)

    def gathered(x):
        out = x.new_empty(world * x.size(0), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group)
        return out

    def own_rows(module):
        rows = module.weight.to_local().detach()
        return rows.to(torch.cuda.current_device()) if torch.cuda.is_available() else rows

    class Embedding(torch.nn.Module):
        def __init__(self, rows, vocabulary: int):
            super().__init__()
            self.rows, self.first = rows, rank * -(-vocabulary // world)

        def forward(self, ids):
            local = gathered(ids.flatten()) - self.first
            inside = (local >= 0) & (local < self.rows.size(0))
            found = self.rows[local.clamp(0, self.rows.size(0) - 1)] * inside[:, None]
            out = found.new_empty(ids.numel(), found.size(1))
            dist.reduce_scatter_tensor(out, found, group=group)  # one of the terms is not zero: exact
            return out.view(*ids.shape, -1)

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, labels, rows, first: int):
            states, targets = gathered(hidden), gathered(labels)
            gradient = torch.empty_like(states, dtype=torch.float32)
            losses = gradient.new_empty(targets.numel())
            for begin in range(0, targets.numel(), size):
                part = slice(begin, begin + size)
                logits = (states[part] @ rows.T).float()
                top = logits.amax(1)
                dist.all_reduce(top, dist.ReduceOp.MAX, group)
                logits -= top[:, None]
                local = targets[part] - first
                inside = (local >= 0) & (local < rows.size(0))
                local = local.clamp(0, rows.size(0) - 1)[:, None]
                target = logits.gather(1, local)[:, 0] * inside
                sums = torch.stack([target, logits.exp_().sum(1)])
                dist.all_reduce(sums, group=group)
                losses[part] = sums[1].log() - sums[0]
                logits /= sums[1][:, None]
                logits.scatter_add_(1, local, -inside[:, None].to(logits.dtype))
                gradient[part] = (logits.to(rows.dtype) @ rows).float()
            own = gradient.new_empty(hidden.shape)
            dist.reduce_scatter_tensor(own, gradient, group=group)
            ctx.save_for_backward((own / labels.numel()).to(hidden.dtype))
            return losses.chunk(world)[rank].mean()

        @staticmethod
        def backward(ctx, scale):
            return ctx.saved_tensors[0] * scale, None, None, None

    class Loss:
        def __init__(self, rows, vocabulary: int):
            self.rows, self.first = rows, rank * -(-vocabulary // world)

        def __call__(self, logits, labels, **_):
            return CrossEntropy.apply(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), self.rows, self.first)

    vocabulary = base.config.vocab_size
    base.model.embed_tokens = Embedding(own_rows(base.model.embed_tokens), vocabulary)
    base.loss_function = Loss(own_rows(base.lm_head), vocabulary)
    base.lm_head = torch.nn.Identity()


def offload_dense(base) -> None:
    """Bring what is not packed to the host, where FSDP2 wants what it offloads: transformers loads it on the GPU."""
    from torch.distributed.tensor import DTensor

    for module in base.modules():
        if any(isinstance(p, DTensor) and p.device.type != "cpu" for p in module.parameters(recurse=False)):
            module.to("cpu")


# ---- one rank -------------------------------------------------------------------------------------------------------


def build(options: argparse.Namespace, record: loading.Record):
    """(model, optimizer, what runs backward)."""
    import torch

    dtype = getattr(torch, options.lora_dtype)
    accelerator = options.accelerator
    if options.load == "layerwise":
        with record.phase("load"):
            model = base = load_layerwise(options, dtype)
    else:
        with record.phase("load"):
            base = load_native(options) if options.load == "native" else load_cut(options)
    if options.offload_weights and options.load == "native":
        offload_dense(base)
    if options.vocabulary == "split":
        split_vocabulary(base, options.chunk)
    elif options.loss == "chunked":
        ChunkedHead(base, options.chunk)
    base.config.use_cache = False
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with record.phase("prepare"):
        if options.load != "layerwise":
            model = add_adapters(base, dtype)
        if options.load == "native":
            from bitshard.fsdp import gather_in_place, shard_adapters

            shard_adapters(model)
            if options.vocabulary == "inplace":
                gather_in_place(base)
        if options.fuse:
            from bitshard import lora

            print(lora.fuse(model), flush=True)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=torch.cuda.is_available() and not options.offload_weights)
        if accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
    if options.graphs:
        from bitshard import graphs

        graphs.enable(model)
    return model.train(), optimizer, accelerator.backward if accelerator is not None else None


def step(model, optimizer, backward, ids, options: argparse.Namespace) -> float:
    import contextlib

    import torch

    around = contextlib.nullcontext()
    if options.offload_activations:
        around = torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
    with around:
        loss = model(input_ids=ids, labels=ids).loss
    (backward or (lambda value: value.backward()))(loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def rank(options: argparse.Namespace) -> None:
    import bitsandbytes
    import torch
    from transformers import AutoConfig

    options.folder = str(Path(options.directory, "packed-head" if options.head == "4bit" else "packed"))
    config = AutoConfig.from_pretrained(options.folder)
    options.hidden = config.hidden_size
    options.accelerator = loading.start_process_group(options.load != "cut")
    loading.synchronize()
    record = loading.Record(options.record)
    world = int(os.environ["WORLD_SIZE"])
    kept = {key: value for key, value in vars(options).items() if isinstance(value, int | float | str)}
    record.values.update(bitsandbytes=bitsandbytes.__version__, options=kept, losses=[])
    if options.cap and record.cuda:
        loading.cap_gpu(options.cap)
    if options.snapshot and record.cuda:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=2_000_000)
    generator = torch.Generator().manual_seed(record.values["rank"])
    record.values["layers"] = config.num_hidden_layers
    ids = torch.randint(0, config.vocab_size, (options.batch, options.tokens), generator=generator)
    ids = ids.to("cuda" if record.cuda else "cpu")
    try:
        model, optimizer, backward = build(options, record)
        record.values["described"] = loading.described(model)
        say(record, "prepare")
        for number in range(options.steps):
            with record.phase(f"step {number + 1}"):
                record.values["losses"].append(step(model, optimizer, backward, ids, options))
            say(record, f"step {number + 1}")
        times = [phase["seconds"] for name, phase in record.values["phases"].items() if name.startswith("step")]
        record.values["step_s"] = statistics.median(times[2:] or times)
        record.values["tokens_per_s"] = world * ids.numel() / record.values["step_s"]
        if options.graphs:
            from bitshard import graphs

            record.values["graphs"] = str(graphs.report(model))
            print(record.values["graphs"], flush=True)
            graphs.disable(model)
        if options.whose:
            count(record, options.whose, lambda: step(model, optimizer, backward, ids, options))
    except Exception as error:
        record.write()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        show_memory(options, record)
        loading.end_of_rank(1)
    record.write()
    show_memory(options, record)
    loading.end_of_rank()


def count(record: loading.Record, steps: int, one) -> None:
    """Whose the host's time of some more steps is, rank 0's."""
    import whose

    begin = time.perf_counter()
    with whose.watching() as found:
        for _ in range(steps):
            one()
    seconds = (time.perf_counter() - begin) / steps
    text = whose.table(found, seconds, record.values["layers"])
    record.values["whose"] = {"seconds": seconds, "table": text, "bitshard": whose.functions(found, "bitshard", 20)}
    if record.values["rank"] == 0:
        print(f"{steps} steps that are watched:\n{text}\nbitshard: {record.values['whose']['bitshard']}", flush=True)


def show_memory(options: argparse.Namespace, record: loading.Record) -> None:
    """--snapshot: how the memory lay at the peak, or when it was not enough."""
    import torch

    if options.snapshot and record.cuda and record.values["rank"] == 0:
        text = snapshot.at_peak(torch.cuda.memory._snapshot(), torch.cuda.current_device())
        Path(options.snapshot).write_text(text)


def say(record: loading.Record, name: str) -> None:
    values = record.values["phases"][name]
    text = ", ".join(f"{key} {value:.2f}" for key, value in values.items() if not key.startswith("host"))
    loss = f", loss {record.values['losses'][-1]:.5f}" if record.values["losses"] else ""
    print(f"{time.strftime('%X')} rank {record.values['rank']} {name}: {text}{loss}", flush=True)


# ---- one launch -----------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    out = Path(options.out)
    name = options.name or "-".join(
        [options.load, f"{options.batch}x{options.tokens}", options.lora_dtype, options.loss]
        + [options.vocabulary] * (options.vocabulary != "gathered")
        + ["head4bit"] * (options.head == "4bit")
        + ["activations"] * options.offload_activations
        + ["weights"] * options.offload_weights
        + ["fused"] * options.fuse
        + ["graphs"] * options.graphs
        + ([Path(options.package).name] if options.package else [])
    )
    if (out / f"{name}.json").exists() and not options.again:
        print(f"{name}: there already")
    else:
        command = loading.launcher(options.load == "cut", options.ranks, out, options.offload_weights)
        command += [__file__, "rank", *sys.argv[2:], "--record", str(out / f"{name}.rank")]
        path = loading.package_path(options.package)
        error = loading.launch(command, out / f"{name}.log", options.timeout, PYTHONPATH=path)
        loading.collect(out, name, error)
    print(summary(json.loads((out / f"{name}.json").read_text())))


def summary(result: dict) -> str:
    """A line of Markdown for one launch: the largest number of all ranks, GiB."""
    ranks = result["ranks"]
    phases = [phase for r in ranks for phase in r["phases"].items()]

    def most(key: str, start: str) -> str:
        found = [values[key] for name, values in phases if name.startswith(start) and key in values]
        return f"{max(found):.2f}" if found else "-"

    cells = [most("allocated_peak", "load"), most("allocated_peak", "prepare"), most("allocated_peak", "step")]
    cells += [
        most("reserved_peak", "step"),
        most("outside_torch", "step"),
        most("retries", "step"),
        most("seconds", "load"),
    ]
    cells += [f"{r['step_s']:.2f} s, {r['tokens_per_s']:.0f} tokens/s" for r in ranks[:1] if "step_s" in r] or ["-"]
    cells.append(", ".join(f"{loss:.4f}" for loss in ranks[0].get("losses", [])) if ranks else "-")
    failed = f" **{result['error']}**" if result["error"] else ""
    return f"{HEAD}\n| {result['name']}{failed} | " + " | ".join(cells) + " |"


HEAD = """| run | load peak | prepare peak | step peak | step reserved | outside torch | retries | load s | step | \
losses |
|---|---|---|---|---|---|---|---|---|---|"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("make", help="write the checkpoint")
    command.add_argument("directory")
    command.add_argument("--shape", choices=loading.SHAPES, default="70b")
    command.add_argument("--layers", type=int, help="fewer layers than the shape has")
    command.add_argument("--kinds", default="packed,packed-head", help="the second shares the files of all layers")
    command.add_argument("--jobs", type=int, default=4, help="processes, which take the GPUs in turn")
    for name in ("train", "rank"):
        command = commands.add_parser(name, **({"help": "one launch"} if name == "train" else {}))
        command.add_argument("--ranks", type=int, default=2)
        command.add_argument("--tokens", type=int, default=512, help="per sequence")
        command.add_argument("--batch", type=int, default=1, help="sequences per rank")
        command.add_argument("--lora-dtype", default="bfloat16", choices=["float32", "bfloat16"])
        command.add_argument("--loss", default="plain", choices=["plain", "chunked"])
        command.add_argument("--chunk", type=int, default=128, help="tokens whose logits exist at a time")
        command.add_argument(
            "--vocabulary",
            default="gathered",
            choices=["gathered", "inplace", "split"],
            help="how embeddings and head come to the tokens: see bitshard.fsdp.gather_in_place, split_vocabulary",
        )
        command.add_argument("--head", default="bf16", choices=["bf16", "4bit"], help="4bit: of DIR/packed-head")
        command.add_argument("--offload-activations", action="store_true")
        command.add_argument("--offload-weights", action="store_true")
        command.add_argument("--load", default="native", choices=["native", "cut", "layerwise"])
        command.add_argument("directory")
        command.add_argument("--fuse", action="store_true", help="bitshard.lora.fuse on the sharded model")
        command.add_argument("--graphs", action="store_true", help="bitshard.graphs.enable on the sharded model")
        command.add_argument("--steps", type=int, default=5)
        command.add_argument("--whose", type=int, default=0, help="more steps, to count whose the host's time is")
        command.add_argument("--cap", type=float, default=0, help="GiB that torch may reserve on a GPU")
        command.add_argument("--snapshot", help="write here how the memory of rank 0 lay at the peak")
        command.add_argument("--package", help="folder with packages instead of the installed ones")
        command.add_argument("--out", default="llama70b-results")
        command.add_argument("--name", help="of the result's file")
        command.add_argument("--timeout", type=float, default=400, help="seconds for the launch")
        command.add_argument("--again", action="store_true")
        if name == "rank":
            command.add_argument("--record", required=True)
    options = parser.parse_args()
    if getattr(options, "vocabulary", "gathered") != "gathered" and (options.load, options.head) != ("native", "bf16"):
        parser.error("--vocabulary split and inplace need --load native and --head bf16")
    if getattr(options, "head", "") == "4bit" and options.load == "layerwise":
        parser.error("--load layerwise has no 4-bit head")
    return options


def main() -> None:
    options = parse()
    if options.command == "make":
        shape = list(loading.SHAPES[options.shape])
        shape[2] = options.layers or shape[2]
        loading.make(Path(options.directory), tuple(shape), options.kinds.split(","), options.jobs)
    elif options.command == "rank":
        options.record += os.environ.get("RANK", "0") + ".json"
        rank(options)
    else:
        train(options)


if __name__ == "__main__":
    main()
