"""axolotl's and unsloth's own files on a GPU, with bitshard's `bitsandbytes` and with the original, one table.

    python benchmarks/checks/tools/on_gpu.py --pack .cache/tools-gpu [--upstream FOLDER] [--out FILE] [--only NAME,...]

The pack is what pack_gpu.py made. Without --upstream the original is taken from the pack, where it is in there. Each
part runs in processes of its own, both packages at a time, 120 s at most; whatever fails is a row with its error.
"""

import argparse
import functools
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import traceback
from pathlib import Path

WORKERS = Path(__file__).resolve().parents[3] / "tests" / "tools" / "workers"
BOTH = ("bitshard", "bitsandbytes")
LIMIT = 120  # seconds of a part
# name: the tool on the path, how many processes, variables of the environment
PARTS = {
    "axolotl_kernels": ("axolotl", 1, {}),
    "axolotl_fsdp2": ("axolotl", 2, {}),
    "unsloth_check": ("unsloth", 1, {}),
    "unsloth_kernels": ("unsloth", 1, {}),
    "unsloth_ctypes": ("unsloth", 1, {"UNSLOTH_BNB_TRITON": "0"}),
    "unsloth_linear": ("unsloth", 1, {"UNSLOTH_BNB_NF4_LINEAR": "1"}),
    "unsloth_fsdp2": ("unsloth", 2, {}),
}


# ---- the caller ----


def unpack(pack: Path, target: Path) -> None:
    for name in ("tools.tar.xz", "upstream.tar.xz"):
        if (pack / name).exists():
            with tarfile.open(pack / name) as archive:
                archive.extractall(target / name.partition(".")[0], filter="data")


def start(name: str, which: str, args: argparse.Namespace, folder: Path) -> subprocess.Popen:
    """One part with one package, in the background; its rows go to a file of its own."""
    import torch

    _, processes, extra = PARTS[name]
    processes = min(processes, max(torch.cuda.device_count(), 1)) if torch.cuda.is_available() else processes
    theirs = [str(args.upstream.resolve())] if which == "bitsandbytes" else []
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = [*theirs, str(folder / "tools"), str(WORKERS), *given]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "BITSHARD_PLUGIN": "0"} | extra
    env |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "4", "TRITON_CACHE_DIR": str(folder / which)}
    command = [sys.executable]
    if "fsdp2" in name:
        command += ["-m", "torch.distributed.run", "--master-port", str(free_port())]
        command += ["--nproc-per-node", str(processes)]
    out = folder / which / name
    out.mkdir(parents=True)
    command += [str(Path(__file__).resolve()), "--part", name, "--out", str(out)]
    with open(out / "log", "w") as log:
        return subprocess.Popen(command, env=env, cwd=out, stdout=log, stderr=subprocess.STDOUT)  # unsloth writes there


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def collect(name: str, which: str, process: subprocess.Popen, folder: Path) -> list[dict]:
    """The rows of a part, or one with its error."""
    out, late = folder / which / name, ""
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        late = f"more than {LIMIT} s"
    rows = [json.loads(line) for line in (out / "rows").read_text().splitlines()] if (out / "rows").exists() else []
    if late or process.returncode or not rows:
        said = (out / "log").read_text().strip().splitlines()
        told = next((line for line in reversed(said) if "Error" in line), said[-1] if said else "nothing printed")
        rows.append({"row": "process", "error": f"{late or process.returncode}: {told[-400:]}"})
    return [{"part": name, "package": which, **row} for row in rows]


def table(rows: list[dict]) -> None:
    """A line per row, ours and the original's side by side."""
    keys = list(dict.fromkeys((row["part"], row["row"]) for row in rows))
    print(f"{'part':16} {'row':26} {BOTH[0]:>44} {BOTH[1]:>44}")
    for part, name in keys:
        cells = [next((r for r in rows if (r["part"], r["row"], r["package"]) == (part, name, w)), None) for w in BOTH]
        shown = ["-" if cell is None else str(cell.get("error") or cell.get("value"))[:44] for cell in cells]
        print(f"{part:16} {name:26} {shown[0]:>44} {shown[1]:>44}")


def main(args: argparse.Namespace) -> int:
    names = args.only.split(",") if args.only else list(PARTS)
    with tempfile.TemporaryDirectory() as temporary:
        folder, rows = Path(temporary), []
        unpack(args.pack, folder)
        args.upstream = args.upstream or folder / "upstream"
        packages = [w for w in BOTH if w == "bitshard" or (args.upstream / "bitsandbytes" / "__init__.py").exists()]
        for name in names:
            running = [(which, start(name, which, args, folder)) for which in packages]
            for which, process in running:
                rows += collect(name, which, process, folder)
    table(rows)
    if args.out:
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        args.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    return int(any(row.get("error") or row.get("bad") for row in rows if row["package"] == "bitshard"))


# ---- the parts, each in a process of its own ----


class Rows:
    """Rows of one part, written as they come."""

    def __init__(self, folder: Path):
        self.path = folder / "rows"

    def add(self, row: str, value, bad: bool = False) -> None:
        self.write({"row": row, "value": value, "bad": bad})

    def write(self, row: dict) -> None:
        """Rank 0's rows, and every rank's errors."""
        rank = os.environ.get("RANK", "0")
        if rank != "0" and "error" in row:
            row = row | {"row": f"{row['row']}, rank {rank}"}
        if rank == "0" or "error" in row:
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")

    def attempt(self, row: str, act, limit: float | None = None) -> None:
        """Add what `act()` returns; a number above `limit` is bad, an exception is an error."""
        try:
            value = act()
        except Exception as error:
            traceback.print_exc()
            self.write({"row": row, "error": f"{type(error).__name__}: {error}"[:1500]})
            return
        self.add(row, value, bad=limit is not None and not value <= limit)


def device():
    import torch

    rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


@functools.cache
def dense() -> str:
    """The folder of a Llama of two layers in bf16. Made before there is a process group: then rank 0 alone saves."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=512, num_hidden_layers=2, max_position_embeddings=128, **sizes)
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def load(nested=True, lora=True, storage=None):
    """The Llama in 4 bits on the device; with LoRA of peft whose B is not zero."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options = {} if storage is None else {"bnb_4bit_quant_storage": storage}
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.bfloat16,
        **options,
    )
    model = AutoModelForCausalLM.from_pretrained(
        dense(), dtype=torch.bfloat16, quantization_config=quantization, device_map={"": device()}
    )
    if not lora:
        return model
    model = get_peft_model(
        model,
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.data = values.to(parameter.device, torch.bfloat16)
    return model


def distance(a, b) -> float:
    """|a - b| / |b| over lists of tensors; NaN where a size differs."""
    if [x.shape for x in a] != [x.shape for x in b]:
        return float("nan")
    gap = sum(float((x.float() - y.float()).square().sum()) for x, y in zip(a, b, strict=True))
    return (gap / sum(float(y.float().square().sum()) for y in b)) ** 0.5


def outcome(model, run, rows=48):
    """Output of `run(x)`, the gradient of x and those of all adapters."""
    import torch

    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, rows, 256, generator=generator).to(device(), torch.bfloat16).requires_grad_()
    model.zero_grad(set_to_none=True)
    out = run(x * 1)
    out = out if isinstance(out, tuple) else (out,)
    sum((one.float() * torch.linspace(-1, 1, one.shape[-1], device=one.device)).sum() for one in out).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [one.detach() for one in out], [x.grad, *gradients]


def fused_rows(rows, label, model, fused, eager):
    """Two rows: how far a fused forward and its gradients are from the eager ones."""

    def both():
        (a, da), (b, db) = outcome(model, fused), outcome(model, eager)
        assert len(da) == len(db) > 2, (len(da), len(db))
        return distance(a, b), distance(da, db)

    try:
        forward, backward = both()
    except Exception as error:
        traceback.print_exc()
        rows.write({"row": label, "error": f"{type(error).__name__}: {error}"[:1500]})
        return
    rows.add(f"{label} forward", round(forward, 5), bad=not forward <= 0.02)
    rows.add(f"{label} backward", round(backward, 5), bad=not backward <= 0.02)


def lora_rows(rows, kernels):
    """The fused LoRA forms of a Llama layer against peft's own, nested and plain scales."""
    for nested in (True, False):
        model, kind = load(nested), "nested" if nested else "plain"
        layer = model.base_model.model.model.layers[0]
        mlp, attention = layer.mlp, layer.self_attn
        fused_rows(rows, f"mlp {kind}", model, lambda x, m=mlp: kernels.apply_lora_mlp_swiglu(m, x), mlp)
        fused_rows(
            rows,
            f"qkv {kind}",
            model,
            lambda x, m=attention: kernels.apply_lora_qkv(m, x),
            lambda x, m=attention: (m.q_proj(x), m.k_proj(x), m.v_proj(x)),
        )
        fused_rows(rows, f"o {kind}", model, lambda x, m=attention: kernels.apply_lora_o(m, x), attention.o_proj)


def packed_weights(nested=True, lora=False):
    import bitsandbytes as bnb

    model = load(nested, lora=lora)
    return model, [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]


def differing(dequantize, nested):
    """Elements of all weights that differ from those of `dequantize_4bit`."""
    import bitsandbytes as bnb

    _, layers = packed_weights(nested)
    wrong = 0
    for layer in layers:
        expected = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        wrong += int((dequantize(layer.weight, layer.weight.quant_state) != expected).sum())
        turned = dequantize(layer.weight.t(), layer.weight.quant_state)
        wrong += int((turned != expected.t()).sum())
    return wrong


def axolotl_kernels(rows):
    from axolotl.kernels import lora, quantize

    rows.add("typed handles", quantize._BNB_TYPED_CAPI)
    for nested in (True, False):
        name = f"dequantize {'nested' if nested else 'plain'}"
        rows.attempt(name, lambda n=nested: differing(quantize.dequantize, n), limit=0)
    lora_rows(rows, lora)


def unsloth_packages():
    from common import package_without_init

    for name in ("unsloth", "unsloth.kernels", "unsloth.models", "unsloth_zoo", "unsloth_zoo.temporary_patches"):
        package_without_init(name)


def unsloth_check(rows):
    import bitsandbytes as bnb

    unsloth_packages()
    from unsloth.bnb_availability import check_native_kernels

    rows.attempt("native kernels", lambda: check_native_kernels(bnb, "cuda") or "ready")
    from unsloth import device_type

    rows.add("4 bits allowed", device_type.ALLOW_BITSANDBYTES, bad=not device_type.ALLOW_BITSANDBYTES)


def unsloth_kernels(rows):
    """fast_dequantize, fast_gemv and the fused LoRA; with UNSLOTH_BNB_TRITON=0 through the native handles."""
    import torch

    unsloth_packages()
    from unsloth.kernels import utils

    rows.add("triton", utils._USE_NF4_KERNELS)
    for nested in (True, False):
        kind = "nested" if nested else "plain"
        rows.attempt(f"dequantize {kind}", lambda n=nested: differing(utils.fast_dequantize, n), limit=0)

        def gemv(function, n=nested):
            _, layers = packed_weights(n)
            layer = layers[0]
            x = torch.randn(1, 1, layer.in_features, device=device(), dtype=torch.bfloat16)
            dense = utils.fast_dequantize(layer.weight, layer.weight.quant_state)
            return round(distance([function(x, layer.weight, layer.weight.quant_state)], [x @ dense.t()]), 5)

        rows.attempt(f"gemv {kind}", lambda f=gemv: f(utils.fast_gemv), limit=0.02)
        rows.attempt(f"native gemv {kind}", lambda f=gemv: f(utils._fast_gemv_ctypes), limit=0.02)
    try:
        from unsloth.kernels import fast_lora
    except Exception as error:
        rows.write({"row": "fused LoRA", "error": f"{type(error).__name__}: {error}"})
        return
    lora_rows(rows, fast_lora)


def unsloth_linear(rows):
    """unsloth's and unsloth_zoo's forwards of Linear4bit against the one they replace."""
    import bitsandbytes as bnb

    unsloth_packages()
    model, layers = packed_weights()
    layer = next(one for one in layers if one.in_features == 256)
    before = outcome(model, layer)

    def again():
        (a, da), (b, db) = outcome(model, layer), before
        return round(max(distance(a, b), distance(da, db)), 5)

    def zoo():
        from unsloth_zoo.temporary_patches.bitsandbytes import patch_bitsandbytes_linear4bit_forward

        original = bnb.nn.Linear4bit.forward
        patch_bitsandbytes_linear4bit_forward()
        rows.add("zoo replaced forward", bnb.nn.Linear4bit.forward is not original)
        return again()

    def override():
        from unsloth.kernels import bnb_override

        rows.add("override installed", bnb_override.install_bnb_nf4_override())
        return again()

    rows.attempt("override", override, limit=0.02)
    rows.attempt("zoo's forward", zoo, limit=0.02)


def step_losses(model, shard=lambda model: None, steps=3):
    """Losses of a few SGD steps, on this rank's rows."""
    import torch

    shard(model.train())  # on CPUs the original repacks what it multiplies in eval mode
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(3, 500, (4, 32), generator=generator).chunk(world)[rank].to(device())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, lr=0.05), []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
            mean /= world
        losses.append(round(float(mean), 4))
    return losses


def fsdp2(rows, wrap, storage):
    """Losses and seen bytes under FSDP2 with bf16 mixed precision, against those without it."""
    import torch
    from common import base_bytes, spies, wrong_bytes
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    alone = step_losses_of_all_rows(load(storage=storage))
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = load(storage=storage)
    watched = spies(model)

    def shard(model):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        with wrap(model):
            for layer in model.base_model.model.model.layers:
                fully_shard(layer, mp_policy=policy)
            fully_shard(model, mp_policy=policy)

    rows.add("world", torch.distributed.get_world_size())
    found = step_losses(model, shard)
    gap = max(abs(a - b) / abs(b) for a, b in zip(found, alone, strict=True))
    rows.add("losses", found)
    rows.add("from one process", round(gap, 5), bad=not gap <= 0.01)
    rows.add("wrong bytes", wrong_bytes(watched), bad=wrong_bytes(watched) != 0)
    held = base_bytes(model)
    rows.add("bytes held", f"{held['local']} of {held['whole']}")


def step_losses_of_all_rows(model):
    """The losses of one process, before a process group is there."""
    kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    try:
        return step_losses(model)
    finally:
        os.environ.update(kept)


def axolotl_fsdp2(rows):
    import contextlib

    import torch
    from axolotl.monkeypatch import fsdp2_qlora

    fsdp2_qlora.apply_init_sharded_param_patch()
    fsdp2_qlora.apply_init_unsharded_param_patch()
    fsdp2_qlora.apply_init_dtype_attrs_patch()
    fsdp2(rows, lambda model: contextlib.nullcontext(), torch.bfloat16)


def unsloth_fsdp2(rows):
    unsloth_packages()
    from unsloth.models.fsdp2_native_quant import native_quant_context

    fsdp2(rows, native_quant_context, None)


def part(name: str, out: Path) -> None:
    """Run one part; where it ends early, its error is the last row."""
    rows = Rows(out)
    function = {"unsloth_ctypes": unsloth_kernels}.get(name) or globals()[name]
    try:
        function(rows)
    except BaseException as error:
        traceback.print_exc()
        rows.write({"row": "end", "error": f"{type(error).__name__}: {error}"[:1500]})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once: a rank that waits in a collective must not hold the others


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--pack", type=Path, default=Path(".cache/tools-gpu"))
    options.add_argument("--upstream", type=Path, help="folder that holds the package bitsandbytes of the original")
    options.add_argument("--out", type=Path)
    options.add_argument("--only", default="")
    options.add_argument("--part", help="for its own use")
    given = options.parse_args()
    if given.part:
        part(given.part, given.out)
    sys.exit(main(given))
