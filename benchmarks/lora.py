"""Host time of a LoRA layer on a 4-bit weight, and time of a training step: peft's layers and fused ones in turn.

    python benchmarks/lora.py [--device cuda] [--dropout 0.05] [--out RESULT.md]

One process and one model, which `bitshard.lora.fuse` and `unfuse` switch in turns, so that both meet the same clock
and neighbours; medians. For the host's time a turn has several steps, of which the later half counts: a change of the
layers' classes empties the interpreter's caches, and in training there is none. Host time is that of a chain of layers,
without waiting for the device: what a layer costs the host where the device keeps up. On a CPU, where the products run
in the same thread, it includes them, hence its small sizes.
"""

import argparse
import itertools
import statistics
import sys
import time
import warnings
from pathlib import Path

import bitsandbytes as bnb
import peft
import torch
import transformers
from bitshard import lora
from timing import commit, cpu_name_and_flags, markdown_table

CHAIN = 8  # layers of the chain
TURN = 20  # steps of it between two changes
KINDS = ("peft", "fused")
# rows and width of the chain; the model of the step, and its tokens
HOST = {"cpu": [(1, 64), (8, 64)], "cuda": [(8, 1024), (512, 4096)]}
MODEL = {
    "cpu": {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4},
    "cuda": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}
TOKENS = {"cpu": (32, 256), "cuda": (512, 2048)}


def quantized(linear: torch.nn.Linear, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """A nested NF4 layer of the size of `linear`, with random weights, on `device`."""
    layer = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, False, dtype, compress_statistics=True, quant_type="nf4"
    )
    return layer.to(dtype).to(device)


def adapted(model: torch.nn.Module, targets: list[str] | str, dtype: torch.dtype, p: float) -> torch.nn.Module:
    """`model` under one LoRA adapter of rank 16, with dropout p and of its own dtype, as trl has it."""
    model.is_loaded_in_4bit = True
    config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=p, target_modules=targets)
    model = peft.get_peft_model(model.requires_grad_(False), config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=dtype) / parameter.shape[1] ** 0.5
    return model.train()


def switch(model: torch.nn.Module, kind: str) -> None:
    if kind == "fused":
        lora.fuse(model)
    else:
        lora.unfuse(model)


def clock(device: str) -> float:
    """Seconds: of this process on a CPU, so that neighbours count less; of the wall beside a GPU."""
    return time.perf_counter() if device == "cuda" else time.process_time()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def host(
    device: str, dtype: torch.dtype, rows: int, width: int, rounds: int, p: float
) -> dict[str, tuple[float, float]]:
    """{kind: microseconds of the host per layer, (forward, backward)}."""
    linear = torch.nn.Linear(width, width, device="meta")
    chain = torch.nn.Sequential(*(quantized(linear, dtype, device) for _ in range(CHAIN)))
    model = adapted(chain, [str(i) for i in range(CHAIN)], dtype, p)
    trained = [p for p in model.parameters() if p.requires_grad]
    x = torch.randn(1, rows, width, dtype=dtype, device=device, requires_grad=True)
    dy = torch.randn(1, rows, width, dtype=dtype, device=device)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for turn, kind in itertools.product(range(1 + max(2 * rounds // TURN, 1)), KINDS):
        switch(model, kind)
        for i in range(TURN):
            wait(device)
            begin = clock(device)
            y = model(x)
            middle = clock(device)
            y.backward(dy)
            end = clock(device)
            x.grad = None
            for parameter in trained:
                parameter.grad = None
            if turn > 0 and i >= TURN // 2:
                times[kind].append((middle - begin, end - middle))
    return {kind: tuple(statistics.median(t) / CHAIN * 1e6 for t in zip(*times[kind], strict=True)) for kind in KINDS}


def step(
    device: str, dtype: torch.dtype, layers: int, tokens: int, rounds: int, p: float
) -> dict[str, tuple[float, float]]:
    """{kind: (milliseconds, peak GiB, 0 on a CPU)} of a step of a Llama with checkpointing and AdamW."""
    settings = {"num_hidden_layers": layers, "vocab_size": 32000, "use_cache": False, **MODEL[device]}
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        torch.set_default_dtype(torch.float32)
    for name, module in list(model.model.named_modules()):
        if type(module) is torch.nn.Linear:
            model.model.set_submodule(name, quantized(module, dtype, device))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = adapted(model, "all-linear", dtype, p)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    ids = torch.randint(0, 32000, (1, tokens), device=device)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    peaks = dict.fromkeys(KINDS, 0.0)
    for i in range(rounds + 2):
        for kind in KINDS:
            switch(model, kind)
            wait(device)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begin = clock(device)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wait(device)
            if i >= 2:
                times[kind].append(clock(device) - begin)
            if device == "cuda":
                peaks[kind] = torch.cuda.max_memory_allocated() / 2**30
    return {kind: (statistics.median(times[kind]) * 1e3, peaks[kind]) for kind in KINDS}


def ratio(found: dict[str, tuple[float, ...]], i: int) -> str:
    return f"{found['fused'][i] / found['peft'][i]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=HOST, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", default="", help="by default float32 and bfloat16 on a CPU, bfloat16 on a GPU")
    parser.add_argument(
        "--rounds", type=int, default=300, help="steps that count for the host's time; a twentieth of it for the model"
    )
    parser.add_argument("--dropout", type=float, default=0.0, help="of the adapters, between 0 and 1")
    parser.add_argument("--layers", type=int, help="of the model of the step, 2 on a CPU and 6 on a GPU")
    parser.add_argument("--out", help="write the tables with versions and command here")
    options = parser.parse_args()
    device = options.device
    dtypes = options.dtypes or ("float32,bfloat16" if device == "cpu" else "bfloat16")
    layers = options.layers or (2 if device == "cpu" else 6)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows, steps = [], []
    for name in dtypes.split(","):
        dtype = getattr(torch, name)
        for shape in HOST[device]:
            found = host(device, dtype, *shape, options.rounds, options.dropout)
            numbers = [f"{found[kind][i]:.1f}" for i in (0, 1) for kind in KINDS]
            ratios = [ratio(found, 0), ratio(found, 1), f"{sum(found['fused']) / sum(found['peft']):.2f}"]
            rows.append([name, f"{shape[0]} x {shape[1]}", *numbers[:2], ratios[0], *numbers[2:], *ratios[1:]])
        for tokens in TOKENS[device]:
            found = step(device, dtype, layers, tokens, max(options.rounds // 20, 5), options.dropout)
            peaks = [f"{found[kind][1]:.2f}" for kind in KINDS] if device == "cuda" else []
            steps.append([name, f"1 x {tokens}", *(f"{found[kind][0]:.1f}" for kind in KINDS), ratio(found, 0), *peaks])
    head = "dtype,rows x width,forward peft us,forward fused us,ratio,backward peft us,backward fused us,ratio,both"
    step_head = "dtype,tokens,peft ms,fused ms,ratio" + (",peft GiB,fused GiB" if device == "cuda" else "")
    text = f"Host time per layer\n\n{markdown_table(head.split(','), rows)}\n\n"
    text += f"Step of a Llama of {layers} layers, {MODEL[device]['hidden_size']} wide\n\n"
    text += markdown_table(step_head.split(","), steps)
    print(text)
    if options.out:
        name = torch.cuda.get_device_name() if device == "cuda" else cpu_name_and_flags()[0]
        versions = f"torch {torch.__version__}, peft {peft.__version__}, transformers {transformers.__version__}"
        title = f"# LoRA layers on 4-bit weights, fused and peft's, {name}\n\n{versions}; bitshard at commit "
        title += f"{commit('python', 'csrc', 'cuda')}\n\nCommand: `python benchmarks/{Path(sys.argv[0]).name} "
        Path(options.out).write_text(f"{title}{' '.join(sys.argv[1:])}`\n\n{text}\n")


if __name__ == "__main__":
    main()
