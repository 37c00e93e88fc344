"""Run the Python blocks of docs/fsdp.md, as they stand there, on the ranks of a process group.

    torchrun --nproc-per-node 2 tests/fsdp/documented.py DOC FOLDER

FOLDER gets a tiny model, its 4-bit form and what the blocks write. Prints "BLOCK <n> ran" for each block, on rank 0.
"""

import os
import re
import sys
from pathlib import Path

import bitshard.fsdp
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.distributed import DistributedConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # its cpu_fsdp, not the one of this folder
import cpu_fsdp  # noqa: E402
import tiny  # noqa: E402

DOC, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
HERE = {"torch.cuda.current_device()": 'torch.device("cpu")'}  # what a machine without a GPU has in the place
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
IDS = torch.arange(3, 27)[None]


def blocks():
    """The Python blocks of the document."""
    found = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    for written, here in HERE.items():
        assert sum(block.count(written) for block in found) == 1, written
        found = [block.replace(written, here) for block in found]
    return found


BLOCKS = blocks()
done = set()


def run(words, **names):
    """Execute the one block that has `words`, with `names` in scope; the names afterwards."""
    (which,) = [i for i, block in enumerate(BLOCKS) if words in block]
    scope = {"torch": torch, "bitshard": bitshard, "BitsAndBytesConfig": BitsAndBytesConfig, "LoraConfig": LoraConfig}
    scope |= {"get_peft_model": get_peft_model, "FullyShardedDataParallel": FullyShardedDataParallel, **names}
    exec(compile(BLOCKS[which], f"{DOC.name}[{which}]", "exec"), scope)
    done.add(which)
    if dist.get_rank() == 0:
        print(f"BLOCK {which} ran", flush=True)
    return scope


def step(model):
    """One step of training; the optimizer, and the loss before it."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    return optimizer, loss.item()


def loading(model_folder):
    """fsdp.load, describe, saving and a distributed checkpoint."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = run("bitshard.fsdp.load(", folder=str(model_folder), policy=policy)["model"]
    run("describe(model)", model=model)
    assert bitshard.fsdp.measure(model).fsdp == "FSDP2"
    optimizer, loss = step(model)
    run("save_pretrained", model=model, folder=str(FOLDER / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(FOLDER / "saved", dtype=torch.bfloat16)  # the block's last: merged
    dist.barrier()
    assert saved(input_ids=IDS, labels=IDS).loss.item() < loss
    names = {"model": model, "optimizer": optimizer, "get_optimizer_state_dict": get_optimizer_state_dict}
    names["folder"] = str(FOLDER / "distributed")
    state = run("load_checkpoint(state, folder)", **names)["state"]
    assert len(state["optimizer"]["state"]) == 28  # two adapters for each of 14 layers


def rows(model_folder):
    """shard_adapters behind a DistributedConfig."""
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.bfloat16, quantization_config=NF4, distributed_config=DistributedConfig(fsdp_size=2)
    )
    model = run("shard_adapters(model)", model=model, lora=LORA)["model"]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(isinstance(p, DTensor) for p in trained)
    step(model)


def first_version(model_folder):
    """FSDP1: one rank reads."""
    cpu_fsdp.send_states()
    names = {"folder": str(model_folder), "config": NF4, "lora": LORA, "fsdp_auto_wrap_policy": fsdp_auto_wrap_policy}
    model = run("load_on_rank0(", **names)["model"]
    assert bitshard.fsdp.measure(model).fsdp == "FSDP1"
    step(model)


def dtypes(model_folder):
    """Adapters of two dtypes become float32."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16, quantization_config=NF4)
    model = get_peft_model(model, LORA)
    trained = [p for p in model.parameters() if p.requires_grad]
    trained[0].data = trained[0].data.bfloat16()
    trained[1].data = trained[1].data.float()
    run("parameter.data.float()", model=model)
    assert {p.dtype for p in trained} == {torch.float32}


def main():
    model_folder, _ = tiny.make(FOLDER / "tiny")
    dist.init_process_group("gloo")
    for part in (loading, rows, first_version, dtypes):
        part(model_folder)
    assert done == set(range(len(BLOCKS))), f"blocks that nothing runs: {set(range(len(BLOCKS))) - done}"
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
