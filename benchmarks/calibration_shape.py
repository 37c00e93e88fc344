"""How long a model of Llama-3-8B's shape takes to calibrate, layer by layer, and how much memory.

    python benchmarks/calibration_shape.py [--layers 32] [--hidden 4096] [--samples 128] [--length 2048] [--cap 12]
        [--tune 0] [--work .cache/calibration-shape] [--make]

Weights are random: time and memory depend on shapes alone. --make only writes the 16-bit folder, which is kept. --cap
limits torch's allocator to so many GiB of the GPU. A run that was ended is repeated and goes on behind its last layer;
the table then has the layers of the last run.
"""

import argparse
import itertools
import json
import resource
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import bitsandbytes
import torch
import transformers
from bitshard.calibration import LayerReport, calibrate_folder
from safetensors.torch import save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 128256


def make(folder: Path, layers: int, hidden: int) -> None:
    """Random bfloat16 weights of a Llama with that many layers, a file for each layer; the head is tied."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=layers, tie_word_embeddings=True,
        num_attention_heads=hidden // 128, num_key_value_heads=max(1, hidden // 512), vocab_size=VOCABULARY,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in LlamaForCausalLM(config).state_dict().items()}
    shapes.pop("lm_head.weight")
    parts: dict[str, list[str]] = {}
    for key in shapes:
        parts.setdefault(".".join(key.split(".")[:3]) if ".layers." in key else "rest", []).append(key)
    table = {}
    generator = torch.Generator(DEVICE).manual_seed(0)
    for number, keys in enumerate(parts.values()):
        name = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
        table.update(dict.fromkeys(keys, name))
        save_file({key: random_values(shapes[key], generator) for key in keys}, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    config.save_pretrained(folder)  # last: a folder with a config is whole


def random_values(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Norms are 1, all else is normal with deviation 0.02."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, generator=generator, device=DEVICE).mul_(0.02).to(torch.bfloat16).cpu()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--cap", type=float, help="GiB")
    parser.add_argument("--tune", type=int, default=0, help="steps of tuning")
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--work", type=Path, default=Path(".cache") / "calibration-shape")
    options = parser.parse_args()
    dense = options.work / f"dense-{options.layers}-{options.hidden}"
    if not (dense / "config.json").exists():
        make(dense, options.layers, options.hidden)
    if not options.make:
        print(measured(options, dense))


def measured(options: argparse.Namespace, dense: Path) -> str:
    """Calibrate; the table."""
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    versions = f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}"
    print(f"{versions}, transformers {transformers.__version__}, {where}")
    if options.cap:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap * 2**30 / whole)
    ids = torch.randint(VOCABULARY, (options.samples, options.length), generator=torch.Generator().manual_seed(0))
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    times = [time.monotonic()]

    def watch(reports: Iterable[LayerReport], total: int) -> Iterable[LayerReport]:
        for each in reports:
            times.append(time.monotonic())
            print(f"layer {each.number + 1} of {total}: {times[-1] - times[-2]:.1f} s,", *each[1:], flush=True)
            yield each

    out = options.work / f"nf4-{options.layers}-{options.hidden}"
    calibrate_folder(dense, out, config, ids, device=DEVICE, tune_steps=options.tune, layer_progress=watch)
    times.append(time.monotonic())
    layers = [b - a for a, b in itertools.pairwise(times[:-1])]
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if DEVICE == "cuda" else [0, 0]
    found = {
        "layers": len(layers),
        "samples": f"{options.samples} x {options.length}",
        "seconds, whole": f"{times[-1] - times[0]:.0f}",
        "a layer (median)": f"{statistics.median(layers):.1f}",
        "tuning and writing" if options.tune else "writing": f"{times[-1] - times[-2]:.0f}",
        "GPU GiB, allocated": f"{peaks[0] / 2**30:.2f}",
        "reserved": f"{peaks[1] / 2**30:.2f}",
        "host GiB": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f}",
    }
    rows = (found, dict.fromkeys(found, "---"), found.values())
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


if __name__ == "__main__":
    main()
