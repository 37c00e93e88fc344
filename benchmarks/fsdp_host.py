"""Host time of a QLoRA step under FSDP2, by owner, and of one checkout of bitshard beside another.

    python benchmarks/fsdp_host.py [--against CHECKOUT] [--layers 32] [--out RESULT.md]

The model has the structure of an 8B Llama: as many decoder layers and parameters, but 64 wide, so that the arithmetic
is next to nothing. LoRA of rank 16 on all seven linears of a layer, fused; sharded layer by layer, 23 parameters a
unit; gradient checkpointing. torch's fake process group plays a second rank: its collectives cost nothing, so what is
measured is the host of one rank.

Calls are exact: how many Python functions of an owner a step calls, and how many C functions these call (torch's
operators are among them). Shares of time are cProfile's, which makes short Python calls look longer than they are.
Without a profiler: the pieces of one gather of one packed weight that are there because it is packed, and whole steps,
in processes of the checkouts that take turns. Both are the least of many, for other work only adds to them.
"""

from __future__ import annotations

import argparse
import cProfile
import inspect
import os
import pstats
import shlex
import sys
import time
import timeit
import warnings
from collections import defaultdict
from pathlib import Path

from timing import ROOT, Contestant, commit, cpu_name_and_flags, markdown_table, serve

# part of "file:function": owner; the first that matches counts.
OWNERS = (
    ("/bitshard/lora/", "bitshard, fused layers"),
    ("/bitshard/nn/linear.py", "bitshard, fused layers"),
    ("/bitshard/nn/holder.py:ready", "bitshard, fused layers"),
    ("/bitshard/formats/state.py:scales", "bitshard, fused layers"),
    ("/bitshard/", "bitshard, sharding"),
    ("/inspect.py:", "signatures of hooks"),
    ("/torch/distributed/fsdp/", "FSDP2"),
    ("/torch/distributed/tensor/", "DTensor"),
    ("/torch/distributed/", "torch.distributed, other"),
    ("/torch/utils/checkpoint", "checkpointing"),
    ("/torch/optim/", "optimizer"),
    ("/torch/", "torch, other"),
    ("/transformers/", "transformers"),
    ("/peft/", "peft"),
)
PHASES = ("forward", "backward", "optimizer")
Function = tuple[str, int, str]  # file ("~" of a C function), line, name


def owner(function: Function) -> str:
    place = f"{function[0]}:{function[2]}"
    return next((name for part, name in OWNERS if part in place), "others")


# ---- one checkout, in a process of its own ----


def llama(layers: int):
    """A Llama of 4-bit layers under a LoRA adapter, all fused."""
    import bitsandbytes as bnb
    import peft
    import torch
    import transformers
    from bitshard import lora

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings = transformers.LlamaConfig(num_hidden_layers=layers, vocab_size=256, use_cache=False, **sizes)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.LlamaForCausalLM(settings)
    torch.set_default_dtype(torch.float32)
    options = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": torch.bfloat16}
    for name, module in list(model.model.named_modules()):
        if type(module) is torch.nn.Linear:
            packed = bnb.nn.Linear4bit(module.in_features, module.out_features, False, torch.bfloat16, **options)
            model.model.set_submodule(name, packed.to(torch.bfloat16).to("cpu"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.is_loaded_in_4bit = True
    config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
    model = peft.get_peft_model(model.requires_grad_(False), config).train()
    report = lora.fuse(model)
    assert len(report.fused) == 7 * layers, str(report)
    return model


def shard(model) -> None:
    """As accelerate does with `fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer` in mixed precision."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    options = {"mesh": init_device_mesh("cpu", (2,)), "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for layer in model.base_model.model.model.layers:
        assert len(list(layer.parameters())) == 23
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for parameter in model.parameters():
        origin = getattr(parameter._local_tensor, "origin", None)
        if origin is not None:
            origin.agreed = True  # the other rank does not exist and has no weights to compare


def least(call) -> float:
    """Microseconds of a call."""
    return min(timeit.repeat(call, number=100, repeat=300)) * 1e4


class Training:
    """A sharded model and its optimizer."""

    def __init__(self, layers: int):
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        warnings.simplefilter("ignore")
        self.model = llama(layers)
        shard(self.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        self.ids = torch.randint(0, 256, (1, 8))

    def step(self) -> list[float]:
        """Seconds of this process for each of PHASES."""
        times = [time.process_time()]
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        times.append(time.process_time())
        loss.backward()
        times.append(time.process_time())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.process_time())
        return [end - begin for begin, end in zip(times, times[1:], strict=False)]

    def pieces(self) -> dict[str, float]:
        """Microseconds of what FSDP2 does with one packed weight in one gather and would not with a dense one."""
        import torch
        from bitshard.sharding.weights.record import record_of
        from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp

        layer = next(module for module in self.model.modules() if hasattr(module, "packed_weight"))
        unit, record = self.model.base_model.model.model.layers[0], record_of(layer, "weight")
        local, mesh = record._sharded_local_tensor, record.shard_mesh_from_root
        unit.unshard()
        whole, shard, inner = record._unsharded_param, record.sharded_param, record._unsharded_inner_tensors
        inputs, metadata = local.fsdp_pre_all_gather(mesh)
        gathered = zip(record.all_gather_outputs, inputs, strict=True)
        outputs = [data.view(-1, *given.shape[1:]) for data, given in gathered]

        def each(function) -> None:
            for tensor in inner:
                function(tensor)

        calls = {
            "signature of the hook": lambda: inspect.signature(local.fsdp_pre_all_gather),
            "hook before the gather": lambda: local.fsdp_pre_all_gather(mesh),
            "hook after the gather": lambda: local.fsdp_post_all_gather(outputs, metadata, torch.bfloat16, out=whole),
            "inner tensors, which are allocated": lambda: each(fsdp.alloc_storage),
            "weight registered": lambda: fsdp.unsafe_setattr_param(layer, "weight", whole),
            "weight asked for its gradient": lambda: whole.requires_grad,
            "shard registered": lambda: fsdp.unsafe_setattr_param(layer, "weight", shard),
        }
        found = {name: least(call) for name, call in calls.items()}
        unit.reshard()
        return {**found, "inner tensors, which are freed": least(lambda: each(fsdp.free_storage))}

    def profiled(self, steps: int) -> dict:
        """Steps under cProfile: {owner: [seconds, Python calls, C calls]} of one, and the same of bitshard's functions.

        Seconds and calls of C functions are those of whoever called them. The seconds of a function are the least of
        all steps; its calls are the same in all.
        """
        found: dict[tuple, list] = {}
        for step in range(steps):
            profile = cProfile.Profile()
            profile.runcall(self.step)
            for key, (calls, seconds) in _edges(profile).items():
                least, most = found.get(key, (seconds, 0))
                found[key] = [min(seconds, least), max(calls, most)]
                assert step == 0 or "/bitshard/" not in key[0][0] or most == calls, f"{key}: {most} and {calls} calls"
        owners: dict[str, list] = defaultdict(lambda: [0.0, 0, 0])
        own: dict[str, list] = defaultdict(lambda: [0.0, 0, 0])
        for (function, in_python), (seconds, calls) in found.items():
            whose, numbers = owner(function), (seconds, calls, 0) if in_python else (seconds, 0, calls)
            _add(owners[whose], numbers)
            if whose == "bitshard, sharding":
                _add(own[f"{function[0].rpartition('/bitshard/')[2]}: {function[2]}"], numbers)
        return {"owners": owners, "own": own}


def _edges(profile: cProfile.Profile) -> dict[tuple[Function, bool], tuple[int, float]]:
    """{(function, True): its calls and seconds without those of others; (function, False): of C functions it calls}."""
    found: dict[tuple[Function, bool], tuple[int, float]] = {}
    for function, (_, calls, seconds, _, callers) in pstats.Stats(profile).stats.items():
        if function[0] != "~":
            found[function, True] = calls, seconds
            continue
        for caller, (_, calls, seconds, _) in callers.items():
            before = found.get((caller, False), (0, 0.0))
            found[caller, False] = before[0] + calls, before[1] + seconds
    return found


def _add(to: list, numbers: tuple) -> None:
    to[:] = [a + b for a, b in zip(to, numbers, strict=True)]


def work() -> None:
    """The process of a checkout."""
    import bitshard
    import torch

    if not Path(bitshard.__file__).is_relative_to(os.environ["CHECKOUT"]):
        raise RuntimeError(f"bitshard is imported from elsewhere than {os.environ['CHECKOUT']}")
    training: list[Training] = []

    def answer(what: str, count: int) -> dict:
        if what == "start":
            training.append(Training(count))
            for _ in range(4):
                training[0].step()
            return {"torch": torch.__version__}
        if what == "steps":
            return {"steps": [training[0].step() for _ in range(count)]}
        return training[0].pieces() if what == "pieces" else training[0].profiled(count)

    serve(answer)


# ---- both checkouts ----


def start(checkout: Path, layers: int) -> Contestant:
    paths = [str(checkout / "python"), str(checkout / "python/bitsandbytes/src")]
    environment = {**os.environ, "CHECKOUT": str(checkout), "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"OMP_NUM_THREADS": "1", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    contestant = Contestant([sys.executable, __file__, "--work"], environment)
    contestant.ask(what="start", count=layers)
    return contestant


def compared(contestants: dict[str, Contestant], turns: int, count: int) -> dict[str, list[float]]:
    """{name: least seconds of each phase and of a whole step}."""
    found = {name: [float("inf")] * 4 for name in contestants}
    for turn in range(turns):
        names = list(contestants)[:: 1 if turn % 2 else -1]
        for name in names:
            for phases in contestants[name].ask(what="steps", count=count)["steps"]:
                found[name] = [min(pair) for pair in zip(found[name], (*phases, sum(phases)), strict=True)]
    return found


def by_owner(found: dict[str, dict], table: str) -> str:
    """One table of all checkouts: shares of the step's time under the profiler, and calls."""
    names = list(found)
    head = [table]
    for what in ("share of time", "Python calls", "C calls"):
        head += [f"{what}, {name}" if len(names) > 1 else what for name in names]
    totals = {name: sum(numbers[0] for numbers in found[name]["owners"].values()) for name in names}
    last = found[names[-1]][table]
    keys = sorted({key for name in names for key in found[name][table]}, key=lambda key: -last.get(key, [0])[0])
    rows = []
    for key in keys:
        numbers = [found[name][table].get(key, [0.0, 0, 0]) for name in names]
        shares = [f"{of[0] / totals[name]:.4f}" for of, name in zip(numbers, names, strict=True)]
        rows.append([key, *shares, *(f"{of[1]:,}" for of in numbers), *(f"{of[2]:,}" for of in numbers)])
    sums = [[sum(of[i] for of in found[name][table].values()) for name in names] for i in (1, 2)]
    shares = [f"{sum(of[0] for of in found[name][table].values()) / totals[name]:.4f}" for name in names]
    rows.append(["all", *shares, *(f"{n:,}" for numbers in sums for n in numbers)])
    return markdown_table(head, rows)


def in_pieces(contestants: dict[str, Contestant], turns: int) -> str:
    """The table of the pieces of one gather."""
    found: dict[str, dict[str, float]] = {name: {} for name in contestants}
    for _ in range(turns):
        for name, contestant in contestants.items():
            for piece, us in contestant.ask(what="pieces", count=1).items():
                found[name][piece] = min(us, found[name].get(piece, us))
    names = list(contestants)
    rows = [[piece, *(f"{found[name][piece]:.2f}" for name in names)] for piece in found[names[0]]]
    rows.append(["all", *(f"{sum(found[name].values()):.2f}" for name in names)])
    return markdown_table(["one gather of one weight", *(f"us, {name}" for name in names)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, built in place, which is measured as 'before'")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--turns", type=int, default=12, help="turns of the checkouts")
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn")
    parser.add_argument("--out", help="write the tables with versions and command here")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work()
    checkouts = {"before": options.against.resolve(), "after": ROOT} if options.against else {"now": ROOT}
    contestants = {name: start(checkout, options.layers) for name, checkout in checkouts.items()}
    seconds = compared(contestants, options.turns, options.steps)
    pieces = in_pieces(contestants, 3)
    found = {name: contestant.ask(what="profile", count=8) for name, contestant in contestants.items()}
    for contestant in contestants.values():
        contestant.close()
    text = f"A step, by owner\n\n{by_owner(found, 'owners')}\n\nbitshard's functions that serve sharding\n\n"
    text += f"{by_owner(found, 'own')}\n\nWithout a profiler\n\n{pieces}"
    if options.against:
        ratios = [after / before for before, after in zip(seconds["before"], seconds["after"], strict=True)]
        rows = [[phase, f"{ratio:.3f}"] for phase, ratio in zip((*PHASES, "step"), ratios, strict=True)]
        text += f"\n\n{markdown_table(['part of a step, before = 1', 'after'], rows)}"
    print(text)
    if options.out:
        import peft
        import torch
        import transformers

        versions = f"torch {torch.__version__}, peft {peft.__version__}, transformers {transformers.__version__}"
        title = f"# Host time of a step under FSDP2, {cpu_name_and_flags()[0]}\n\n{versions}; bitshard at commit "
        title += f"{commit('python', 'csrc')}\n\nCommand: `python benchmarks/fsdp_host.py {shlex.join(sys.argv[1:])}`"
        Path(options.out).write_text(f"{title}\n\n{text}\n")


if __name__ == "__main__":
    main()
