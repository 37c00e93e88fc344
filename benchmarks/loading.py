"""What it takes to load a 4-bit model under FSDP2: peak memory of GPU and host, and seconds, way by way.

    python benchmarks/loading.py make DIR         # random weights of the 8B shape: DIR/bf16, DIR/packed, DIR/packed16
    python benchmarks/loading.py run DIR --way native --from packed --out RESULTS
    python benchmarks/loading.py all DIR --old FOLDER --upstream FOLDER --out RESULTS [--cap GIB]

Ways: `native` is `from_pretrained(distributed_config=...)` under torchrun; `cut` is accelerate's FSDP2, where each
rank keeps its part of every weight while it loads; `whole` the same with whole weights until accelerate shards them;
`single` one process with the whole model, to compare logits with. DIR/packed has uint8 storage, DIR/packed16 the same
weights in bfloat16, without which accelerate leaves upstream's weights whole on every rank. --old and --upstream name
folders with packages to be measured in the place of the installed ones (a checkout with its core built in place, or
unpacked wheels).

--cap is for machines with larger GPUs than are to be shown: it limits torch's allocator and makes
`torch.cuda.mem_get_info` answer the limit. Without a GPU everything runs on the CPU (`make --shape tiny`).
Every result is a JSON file in RESULTS; a run that is there is not made again. Files that were just made are read from
the page cache: the seconds are those of a fast disk.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

os.environ["BITSHARD_PLUGIN"] = "0"  # an original bitsandbytes runs its own kernels
ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
SHAPES = {  # hidden, intermediate, layers, heads, key and value heads, vocabulary
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "70b": (8192, 28672, 80, 64, 8, 128256),
    "tiny": (128, 384, 3, 4, 2, 512),
}
STORAGES = {"bf16": None, "packed": "uint8", "packed16": "bfloat16", "packed-head": "uint8"}  # the last: a 4-bit head


# ---- checkpoints of random weights ----------------------------------------------------------------------------------


def linears(hidden: int, intermediate: int, heads: int, kv_heads: int) -> dict[str, tuple[int, int]]:
    """[N, K] of the linear layers of a decoder layer."""
    kv = hidden // heads * kv_heads
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def random_weight(name: str, size: tuple[int, int], device: str):
    """bf16 numbers that depend on the name (and on the kind of device) only."""
    import torch

    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)


def quantized(name: str, weight, storage: str) -> dict:
    """The entries of a checkpoint for one weight in nested NF4, blocksize 64."""
    import torch
    from bitshard import functional

    packed, state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4", quant_storage=getattr(torch, storage)
    )
    entries = {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
    return {name: packed, **entries}


def file_of_layer(layer: int, shape: tuple, kind: str, device: str) -> dict:
    """Tensors of decoder layer `layer` on the CPU; behind the last one those of embeddings, head and last norm."""
    import torch

    hidden, intermediate, layers, heads, kv_heads, vocabulary = shape
    tensors = {}
    if layer == layers:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = random_weight(name, (vocabulary, hidden), device)
        if kind == "packed-head":
            tensors.update(quantized("lm_head.weight", tensors.pop("lm_head.weight"), STORAGES[kind]))
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        return tensors
    for short, size in linears(hidden, intermediate, heads, kv_heads).items():
        name = f"model.layers.{layer}.{short}.weight"
        weight = random_weight(name, size, device)
        entries = quantized(name, weight, STORAGES[kind]) if STORAGES[kind] else {name: weight}
        tensors.update({key: value.cpu().contiguous() for key, value in entries.items()})
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return tensors


def write_part(folder: Path, shape: tuple, kind: str, part: int, parts: int) -> None:
    """Every `parts`th file of a checkpoint; files that are there are left."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(part % torch.cuda.device_count())
    for layer in range(part, shape[2] + 1, parts):
        path = folder / f"model-{layer + 1:05d}-of-{shape[2] + 1:05d}.safetensors"
        if path.exists():
            continue
        twin = folder.parent / "packed" / path.name
        if kind == "packed-head" and layer < shape[2] and twin.exists():
            path.hardlink_to(twin)
            continue
        started = time.perf_counter()
        tensors = file_of_layer(layer, shape, kind, device)
        made = time.perf_counter()
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.rename(path)
        took = f"made in {made - started:.1f} s, written in {time.perf_counter() - made:.1f} s"
        print(f"{folder.name}/{path.name} {path.stat().st_size / GIB:.2f} GiB {took}", flush=True)


def write_config(folder: Path, shape: tuple, kind: str) -> None:
    """config.json and the index of the files in `folder`."""
    import torch
    from safetensors import safe_open
    from transformers import BitsAndBytesConfig, LlamaConfig

    hidden, intermediate, layers, heads, kv_heads, vocabulary = shape
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ).to_dict()
    config.update(architectures=["LlamaForCausalLM"], dtype="bfloat16")
    if STORAGES[kind]:
        config["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=getattr(torch, STORAGES[kind]),
            llm_int8_skip_modules=[] if kind == "packed-head" else None,
        ).to_dict()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    names = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names.update(dict.fromkeys(file.keys(), path.name))
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make(directory: Path, shape: tuple, kinds: list[str], jobs: int) -> None:
    """Write checkpoints `directory`/KIND with `jobs` processes, which take the GPUs in turn."""
    for kind in kinds:
        folder, started = directory / kind, time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        sizes = ",".join(map(str, shape))
        command = [sys.executable, __file__, "part", str(folder), "--sizes", sizes, "--kind", kind, "--part"]
        processes = [subprocess.Popen([*command, f"{part}/{jobs}"]) for part in range(jobs)]
        if any([process.wait() for process in processes]):
            sys.exit(f"{folder}: a process that writes it failed")
        write_config(folder, shape, kind)
        total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"{folder}: {total / GIB:.2f} GiB in {time.perf_counter() - started:.0f} s", flush=True)


# ---- what a rank measures -------------------------------------------------------------------------------------------


def host_memory() -> dict[str, float]:
    """GiB of this process: private (anonymous) pages, and its share of mapped files and of shared memory."""
    try:
        lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
        sizes = {fields[0][:-1]: int(fields[1]) * 1024 / GIB for fields in lines if len(fields) == 3}
        return {"private": sizes["Pss_Anon"], "files": sizes["Pss_File"], "shared": sizes["Pss_Shmem"]}
    except (OSError, KeyError):  # some sandboxes have the older file only; shared pages count whole there
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
        sizes = {fields[0][:-1]: int(fields[1]) * 1024 / GIB for fields in lines if fields[-1] == "kB"}
        return {"private": sizes["RssAnon"], "files": sizes["RssFile"], "shared": sizes["RssShmem"]}


class HostPeak(threading.Thread):
    """The largest private memory of this process since `reset`, looked at every 20 ms or less often if that is slow."""

    def __init__(self):
        super().__init__(daemon=True)
        self.reset()
        self.start()

    def reset(self) -> None:
        self.value = host_memory()["private"]

    def run(self) -> None:
        while True:
            started = time.perf_counter()
            self.value = max(self.value, host_memory()["private"])
            time.sleep(max(0.02, 20 * (time.perf_counter() - started)))


def cap_gpu(gib: float) -> None:
    """Let torch's allocator, and who asks for the size of the GPU, see a GPU of `gib`. For measuring only."""
    import torch

    limit, total = int(gib * GIB), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(limit / total)
    torch.cuda.mem_get_info = lambda device=None: (limit - torch.cuda.memory_reserved(device), limit)


class Record:
    """What one rank saw, written to its file after each phase, so that a run that dies has left what it saw."""

    def __init__(self, path: str):
        import torch

        self.path, self.cuda, self.host = Path(path), torch.cuda.is_available(), HostPeak()
        self.real_memory = torch.cuda.mem_get_info  # before `cap_gpu` replaces it
        self.base = host_memory()
        self.values: dict = {"rank": int(os.environ.get("RANK", "0")), "torch": torch.__version__, "phases": {}}
        self.values["device"] = torch.cuda.get_device_name() if self.cuda else "CPU"

    def phase(self, name: str) -> "Phase":
        return Phase(self, name)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.values, indent=1))


class Phase:
    """with record.phase("load"): seconds until all ranks are through, and the largest memory on the way."""

    def __init__(self, record: Record, name: str):
        self.record, self.values = record, record.values["phases"].setdefault(name, {})

    def __enter__(self) -> dict:
        import torch

        synchronize()
        if self.record.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.record.host.reset()
        self.started = time.perf_counter()
        return self.values

    def __exit__(self, kind, error, trace) -> None:
        import torch

        if error is None:
            synchronize()
        else:
            self.record.values["error"] = f"{kind.__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        self.values["seconds"] = time.perf_counter() - self.started
        base, now = self.record.base, host_memory()
        self.values["host_private_peak"] = max(self.record.host.value, now["private"]) - base["private"]
        self.values.update({f"host_{name}": now[name] - base[name] for name in now})
        if self.record.cuda:
            cuda = torch.cuda
            free, total = self.record.real_memory()
            self.values.update(
                allocated_peak=cuda.max_memory_allocated() / GIB,
                reserved_peak=cuda.max_memory_reserved() / GIB,
                allocated=cuda.memory_allocated() / GIB,
                reserved=cuda.memory_reserved() / GIB,
                outside_torch=(total - free - cuda.memory_reserved()) / GIB,  # driver, NCCL, cuBLAS, loaded kernels
                retries=cuda.memory_stats()["num_alloc_retries"],
            )
        self.record.write()


def synchronize() -> None:
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def end_of_rank(status: int = 0) -> None:
    """End the process at once: with gloo an interpreter that shuts down behind its last collective can abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# ---- one rank -------------------------------------------------------------------------------------------------------


def load(folder: str, source: str, way: str, storage: str):
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options = {}
    if source == "bf16":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=getattr(torch, storage),
        )
    if way == "native":
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))
    return AutoModelForCausalLM.from_pretrained(f"{folder}/{source}", dtype=torch.bfloat16, **options)


def forward(model, vocabulary: int) -> dict:
    """Loss and a hash of the logits of 64 fixed tokens, the same on every rank."""
    import torch

    ids = torch.randint(0, vocabulary, (1, 64), generator=torch.Generator().manual_seed(0))
    ids = ids.to("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        result = model(input_ids=ids, labels=ids)
    logits = result.logits.detach().to("cpu", torch.float32).contiguous()
    return {"loss": float(result.loss), "logits": hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:12]}


def start_process_group(native: bool):
    """The accelerator of an `accelerate launch`, or the process group of torchrun."""
    import torch
    import torch.distributed as dist

    if not native:
        from accelerate import Accelerator

        return Accelerator()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return None


def rank(arguments: argparse.Namespace) -> None:
    """What every process of `run` does."""
    import bitsandbytes
    import torch
    from peft import LoraConfig, get_peft_model

    way = arguments.way
    accelerator = None if way == "single" else start_process_group(way == "native")
    synchronize()  # the memory of CUDA and NCCL is there before anything is measured
    record = Record(arguments.record)
    record.values.update(way=way, source=arguments.source, bitsandbytes=bitsandbytes.__version__)
    if arguments.cap and record.cuda:
        cap_gpu(arguments.cap)
    try:
        with record.phase("load"):
            model = load(arguments.directory, arguments.source, way, arguments.storage)
        lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        vocabulary = model.config.vocab_size
        with record.phase("prepare"):
            model = get_peft_model(model, lora)
            if way == "native":
                from bitshard.fsdp import shard_adapters

                shard_adapters(model)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            if accelerator is not None:
                model, optimizer = accelerator.prepare(model, optimizer)
        record.values["described"] = described(model)
        with record.phase("forward"):
            record.values.update(forward(model, vocabulary))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        end_of_rank(1)
    record.write()
    end_of_rank()


def described(model) -> str:
    """How the weights lie, in the package's words; nothing for upstream."""
    try:
        from bitshard import fsdp

        return fsdp.describe(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


# ---- launching ------------------------------------------------------------------------------------------------------


def package_path(folder: str | None) -> str:
    """PYTHONPATH that imports the packages in `folder`: a checkout, or a folder of unpacked wheels."""
    if not folder:
        return ""
    root = Path(folder).resolve()
    if (root / "python" / "bitshard").is_dir():
        return os.pathsep.join([str(root / "python"), str(root / "python" / "bitsandbytes" / "src")])
    return str(root)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def accelerate_config(folder: Path, ranks: int, offload: bool) -> Path:
    """What `accelerate config` writes for FSDP2, with loading that spares the host."""
    text = f"""compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
machine_rank: 0
num_processes: {ranks}
main_process_port: {free_port()}
mixed_precision: "no"
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_reshard_after_forward: true
  fsdp_offload_params: {str(offload).lower()}
  fsdp_cpu_ram_efficient_loading: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "accelerate.yaml"
    path.write_text(text)
    return path


def launcher(with_accelerate: bool, ranks: int, folder: Path, offload: bool = False) -> list[str]:
    """The command before the name of the script."""
    if not with_accelerate:
        command = ["torch.distributed.run", "--nproc-per-node", str(ranks), "--nnodes", "1"]
        return [sys.executable, "-m", *command, "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    import torch

    config = str(accelerate_config(folder, ranks, offload))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    return command if torch.cuda.is_available() else [*command, str(ROOT / "examples" / "cpu_fsdp.py")]


def launch(command: list[str], log: Path, timeout: float, **environment: str) -> str:
    """Run a command in a process group of its own; "" or the line that tells why it failed."""
    paths = [environment.pop("PYTHONPATH", ""), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"no end after {timeout:.0f} s"
    return "" if status == 0 else reason(log.read_text(errors="replace"), status)


def reason(text: str, status: int) -> str:
    """The last line of a log that names an error of a rank."""
    lines = [re.sub(r"^\[?rank\d+\]?:\s*", "", line.strip()) for line in text.splitlines()]
    named = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|OutOfMemory\w*)\b: ", line)]
    own = [line for line in named if "ChildFailedError" not in line and "CalledProcessError" not in line]
    return (own or [f"exit status {status}"])[-1][:400]


def collect(folder: Path, name: str, error: str) -> dict:
    """One JSON file of what the ranks of a run left."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.rank*.json"))]
    result = {"name": name, "error": error or next((r["error"] for r in ranks if "error" in r), ""), "ranks": ranks}
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1))
    for path in folder.glob(f"{name}.rank*.json"):
        path.unlink()
    return result


def run(arguments: argparse.Namespace, package: str, way: str, source: str, storage: str) -> dict:
    """One launch, whose result is OUT/NAME.json; the one that is there, if it ended well."""
    out = Path(arguments.out)
    name = f"{package}-{way}-{source}" + (f"-cap{arguments.cap:g}" if arguments.cap else "")
    done = out / f"{name}.json"
    if done.exists() and not arguments.again:
        return json.loads(done.read_text())
    folder = {"old": arguments.old, "upstream": arguments.upstream}.get(package, arguments.new)
    command = launcher(way in ("cut", "whole"), arguments.ranks, out)
    command = [sys.executable] if way == "single" else command
    command += [__file__, "rank", arguments.directory, "--way", way, "--from", source, "--storage", storage]
    command += ["--record", str(out / f"{name}.rank"), "--cap", str(arguments.cap)]
    cut = {"BITSHARD_CUT": "0"} if way == "whole" else {}
    error = launch(command, out / f"{name}.log", arguments.timeout, PYTHONPATH=package_path(folder), **cut)
    result = collect(out, name, error)
    print(row(result), flush=True)
    return result


HEAD = """| way | load: peak, reserved | prepare: peak, reserved | after | forward: peak | host private: load, after | \
mapped files | load s | prepare s | loss | logits |
|---|---|---|---|---|---|---|---|---|---|---|"""


def row(result: dict) -> str:
    """A line of the table: the largest number of all ranks, GiB."""

    def most(phase: str, *keys: str) -> str:
        found = [[r["phases"].get(phase, {}).get(key) for r in result["ranks"]] for key in keys]
        return ", ".join("-" if not v or None in v else f"{max(v):.2f}" for v in found)

    peaks = [most(phase, "allocated_peak", "reserved_peak") for phase in ("load", "prepare")]
    cells = [*peaks, most("prepare", "allocated"), most("forward", "allocated_peak")]
    cells += [most("load", "host_private_peak", "host_private"), most("load", "host_files")]
    cells += [most("load", "seconds"), most("prepare", "seconds")]
    losses, hashes = ({r[key] for r in result["ranks"] if key in r} for key in ("loss", "logits"))
    cells += ["; ".join(f"{loss:.6f}" for loss in losses) or "-", "; ".join(hashes) or "-"]
    failed = f" **{result['error']}**" if result["error"] else ""
    return f"| {result['name']}{failed} | " + " | ".join(cells) + " |"


def run_all(arguments: argparse.Namespace) -> None:
    """Every way that a folder is given for, from dense and from packed files, in turn, and the table."""
    results = []
    for source in arguments.sources.split(","):
        plan = [("new", "single", source), ("new", "cut", source), ("new", "native", source), ("new", "whole", source)]
        if arguments.old:
            plan.append(("old", "whole", source))
        if arguments.upstream:  # bfloat16 storage: accelerate leaves uint8 weights whole
            plan.append(("upstream", "whole", "packed16" if source == "packed" else source))
        for package, way, files in plan:
            if way not in arguments.ways.split(","):
                continue
            if not (Path(arguments.directory) / files / "config.json").exists():
                print(f"{package} {way}: no {files} in {arguments.directory}", flush=True)
                continue
            storage = "bfloat16" if package == "upstream" else "uint8"
            results.append(run(arguments, package, way, files, storage))
    title = f"# Loading, {arguments.ranks} ranks" + (f", capped at {arguments.cap:g} GiB" if arguments.cap else "")
    devices = {(r["device"], r["torch"]) for result in results for r in result["ranks"]}
    text = "\n".join([title, "", str(sorted(devices)), "", HEAD, *map(row, results)])
    print(text)
    cap = f"-cap{arguments.cap:g}" if arguments.cap else ""
    (Path(arguments.out) / f"loading{cap}.md").write_text(text + "\n")


# ---- command line ---------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str | None) -> argparse.ArgumentParser:
        command = commands.add_parser(name, **({"help": text} if text else {}))
        command.add_argument("directory")
        return command

    command = add("make", "write checkpoints of random weights")
    command.add_argument("--shape", choices=SHAPES, default="8b")
    command.add_argument("--layers", type=int, help="fewer layers than the shape has")
    command.add_argument("--kinds", default="bf16,packed,packed16")
    command.add_argument("--jobs", type=int, default=2)
    command = add("part", None)
    command.add_argument("--sizes", required=True)
    command.add_argument("--kind", required=True)
    command.add_argument("--part", required=True)
    for name, text in (("run", "one way"), ("all", "every way, one table"), ("rank", None)):
        command = add(name, text)
        command.add_argument("--cap", type=float, default=0, help="GiB that torch may reserve on a GPU")
        if name != "all":
            command.add_argument("--way", choices=["single", "cut", "native", "whole"], required=True)
            command.add_argument("--from", dest="source", choices=STORAGES, required=True)
            command.add_argument("--storage", default="uint8", help="bnb_4bit_quant_storage for dense files")
        else:
            command.add_argument("--ways", default="single,cut,native,whole")
            command.add_argument("--sources", default="bf16,packed")
        if name == "rank":
            command.add_argument("--record", required=True)
            continue
        command.add_argument("--ranks", type=int, default=2)
        command.add_argument("--package", default="new", choices=["new", "old", "upstream"], help="what `run` imports")
        for package in ("new", "old", "upstream"):
            command.add_argument(
                f"--{package}", help="folder with packages" if package != "new" else "instead of pip's"
            )
        command.add_argument("--out", default="loading-results")
        command.add_argument("--timeout", type=float, default=240, help="seconds for one run")
        command.add_argument("--again", action="store_true", help="also what has a result already")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.command == "make":
        shape = list(SHAPES[arguments.shape])
        shape[2] = arguments.layers or shape[2]
        make(Path(arguments.directory), tuple(shape), arguments.kinds.split(","), arguments.jobs)
    elif arguments.command == "part":
        part, parts = map(int, arguments.part.split("/"))
        shape = tuple(map(int, arguments.sizes.split(",")))
        write_part(Path(arguments.directory), shape, arguments.kind, part, parts)
    elif arguments.command == "rank":
        arguments.record += os.environ.get("RANK", "0") + ".json"
        rank(arguments)
    elif arguments.command == "run":
        print(HEAD)
        run(arguments, arguments.package, arguments.way, arguments.source, arguments.storage)
    else:
        run_all(arguments)


if __name__ == "__main__":
    main()
