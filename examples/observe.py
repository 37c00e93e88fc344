"""Run examples/qlora.py and write down, per process, what happened: losses, memory, and how much of the base it holds.

    accelerate launch --config_file examples/fsdp2.yaml examples/observe.py REPORTS --model ... (options of qlora.py)

Writes REPORTS/rank0.json, rank1.json, ...; `examples/demo.py` reads them. Under FSDP it stops with an error when the
base is not sharded: a launch that fell back to DDP trains to the same losses, and only the weights themselves tell.
"""

import json
import os
import sys
from pathlib import Path

import cpu_fsdp
import qlora
import torch
import transformers
from bitshard.fsdp import describe, measure
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def n_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of `tensor`."""
    return tensor.numel() * tensor.element_size()


def frozen_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """(bytes here, bytes in all) of the frozen parameters: packed 4-bit weights, embeddings, norms; not the scales."""
    here = total = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        whole = n_bytes(parameter)
        if hasattr(parameter, "_unpadded_unsharded_size"):  # FSDP1: the flat parameter of a unit
            whole = parameter._unpadded_unsharded_size.numel() * parameter.element_size()
        here += n_bytes(local)
        total += whole
    return here, total


def sharding(model: torch.nn.Module) -> str:
    """Say how the base is sharded, "FSDP2", "FSDP1" or "none", judged by what the weights are.

    Raises RuntimeError when an FSDP launch left 4-bit weights whole.
    """
    wanted = os.environ.get("FSDP_VERSION") if os.environ.get("ACCELERATE_USE_FSDP") == "true" else None
    weights = [module.weight for module in model.modules() if type(module).__name__ == "Linear4bit"]
    if wanted == "2":
        if not weights or not all(isinstance(weight, DTensor) for weight in weights):
            raise RuntimeError("FSDP2 was asked for, but the 4-bit weights are no DTensors: the base is not sharded")
        return "FSDP2"
    if wanted == "1":
        whole = [name for name, p in model.named_parameters() if type(p).__name__ == "Params4bit"]
        if whole or not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise RuntimeError(
                "FSDP1 was asked for, but the 4-bit weights are in no flat parameter: the base is not sharded"
            )
        return "FSDP1"
    return "none"


def check_share(here: int, total: int, world: int) -> None:
    """Raise unless this process holds 1/world of the frozen base; a hundredth is left for padding."""
    if here > 1.01 * total / world:
        raise RuntimeError(f"this process holds {here} of {total} bytes of the base, more than 1/{world}")


def peak_memory() -> int:
    """Bytes: the most that this process ever held, on its GPU where it has one, else resident on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    """Train with the arguments of qlora.py behind the folder for the reports."""
    folder = Path(sys.argv[1])
    transformers.logging.disable_progress_bar()  # the bars of loading; training keeps its own
    on_gloo = "LOCAL_RANK" in os.environ and not torch.cuda.is_available()
    if on_gloo:
        cpu_fsdp.install()
    before = peak_memory()
    trainer = qlora.main(sys.argv[2:])
    rank, world = trainer.args.process_index, trainer.args.world_size
    here, total = frozen_bytes(trainer.model)
    kind = sharding(trainer.model)
    if kind != "none":
        check_share(here, total, world)
    share = measure(trainer.model)
    report = {
        "sharding": kind,
        "world": world,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "seconds": trainer.state.log_history[-1]["train_runtime"],
        "proof": describe(trainer.model),
        "peak_bytes": peak_memory() - before,
        "frozen_bytes": here,
        "frozen_bytes_total": total,
        "packed_bytes": share.own_packed,
        "packed_bytes_total": share.packed,
        "scale_bytes": share.own_scales,
        "scale_bytes_total": share.scales,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.json").write_text(json.dumps(report, indent=1))
    if on_gloo:
        cpu_fsdp.leave()


if __name__ == "__main__":
    main()
