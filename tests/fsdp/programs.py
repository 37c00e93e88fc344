"""examples/fsdp_qlora.py, called with one set of options after another in one launch.

    torchrun --nproc-per-node 2 tests/fsdp/programs.py --dir DIR --out DIR/sharded
    python tests/fsdp/programs.py --dir DIR --out DIR/alone

The second is one process without sharding, on the same batches: what the first is compared with.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import cpu_fsdp  # noqa: E402
import fsdp_qlora  # noqa: E402
import tiny  # noqa: E402
from transformers import AutoModelForCausalLM, BitsAndBytesConfig  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

SIZE = "--wrap size --min-params 10000"  # of the tiny model attention, MLP, embeddings
# name: options beside the version of FSDP
RUNS = {
    "full-bf16": "--train-type full --precision bf16",
    "full-fp32-low": f"--train-type full --precision fp32 --low-memory --accumulate 2 {SIZE} --save",
    "lora-fp32-low": "--train-type lora --precision fp32 --low-memory --checkpointing",
    "lora-mp_fp16_autocast": "--train-type lora --precision mp_fp16_autocast",
    "qlora-fp32": "--train-type qlora --precision fp32 --accumulate 2 --save",
    "qlora-fp32-low": f"--train-type qlora --precision fp32 --accumulate 2 --low-memory --checkpointing {SIZE} --save",
    "qlora-bf16": f"--train-type qlora --precision bf16 {SIZE}",
    "qlora-bf16-low": "--train-type qlora --precision bf16 --low-memory",
    "qlora-mp_fp16_autocast": "--train-type qlora --precision mp_fp16_autocast --low-memory",
    "offload-mp_fp16_autocast": "--train-type qlora --precision mp_fp16_autocast --low-memory --offload",  # FSDP2
    "qlora-mp_bf16_autocast": "--train-type qlora --precision mp_bf16_autocast --low-memory --checkpointing",
    "qlora-mp_bf16_buffers_autocast": "--train-type qlora --precision mp_bf16_buffers_autocast",
    "qlora-fp32-low-packed": "--train-type qlora --precision fp32 --accumulate 2 --low-memory --model packed",
    "dora-fp32": f"--train-type dora --precision fp32 --save {SIZE}",
    "dora-fp32-low": "--train-type dora --precision fp32 --low-memory --save",
    "hf_qlora-fp32": "--train-type hf_qlora --precision fp32 --accumulate 2",
    "hf_qlora-fp32-low": "--train-type hf_qlora --precision fp32 --accumulate 2 --low-memory --save",
}
ALONE = "full-bf16 full-fp32-low lora-fp32-low lora-mp_fp16_autocast qlora-fp32 qlora-bf16 qlora-mp_fp16_autocast"
ALONE = [*ALONE.split(), "qlora-mp_bf16_autocast", "qlora-mp_bf16_buffers_autocast", "dora-fp32"]
# what exits with a line, and words of it; under both versions of FSDP unless one is named
REFUSED = {
    "packed-full": ("--train-type full --model packed", "needs dense files"),
    "packed-whole": ("--train-type qlora --model packed", "--low-memory"),
    "fsdp0": ("--fsdp 0", "one process"),
    "offload-cpu": ("--offload --fsdp 1", "from GPUs only"),
    "packed-hf": ("--train-type hf_qlora --model packed --fsdp 1", "use --train-type qlora"),
}


def prepare(folder):
    """The tiny model, dense and packed."""
    model, text = tiny.make(Path(folder, "tiny"))
    packed = Path(folder, "packed")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    if not packed.exists():
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, quantization_config=config)
        loaded.save_pretrained(packed)
        for file in Path(model).glob("token*"):
            (packed / file.name).write_bytes(file.read_bytes())


def options_of(folder, name, line, version, batch):
    line = line.replace("--model packed", f"--model {folder}/packed")
    line = line.replace("--save", f"--save {folder}/{name}-{version}")
    common = f"--model {folder}/tiny/model --text {folder}/tiny/text.txt --fsdp {version} --batch {batch} --steps 3"
    return fsdp_qlora.parse(f"{common} --length 32 --lr 1e-2 --rank 4 {line}".split())


def run(folder, name, line, version, batch):
    """Losses, and what rank 0 said of the base."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        losses = fsdp_qlora.train(options_of(folder, name, line, version, batch))
    return {"losses": losses, "said": said.getvalue()}


def refuse(folder, name):
    try:
        fsdp_qlora.train(options_of(folder, name, REFUSED[name][0], 2, 1))
    except SystemExit as error:
        return {"line": str(error.code)}
    raise AssertionError(f"trained: {REFUSED[name][0]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    alone = "RANK" not in os.environ
    cpu_fsdp.send_states()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        prepare(args.dir)
    else:
        dist.init_process_group("gloo")
    jobs = {}
    for name, line in RUNS.items():
        for version in [0] if alone else [1, 2]:
            if name in ALONE if alone else version == 2 or not name.startswith("offload"):
                line_here = line.replace("--low-memory", "") if alone else line
                jobs[f"{name}-{version}"] = lambda n=name, x=line_here, v=version: run(
                    args.dir, n, x, v, 2 if alone else 1
                )
    if not alone:
        jobs |= {name: lambda name=name: refuse(args.dir, name) for name in REFUSED}
    results = {}
    for name, job in jobs.items():
        if not name.startswith(tuple(args.only.split(","))):
            continue
        try:
            results[name] = job()
        except Exception:
            results[name] = {"error": traceback.format_exc()[-4000:]}
            break  # the ranks may be out of step
    with open(f"{args.out}.{dist.get_rank()}", "w") as file:
        json.dump(results, file, indent=1)
    cpu_fsdp.leave()


if __name__ == "__main__":
    main()
