"""Checkpoints written from shards, layer by layer, and what one process writes: the same files, byte by byte.

    torchrun --nproc-per-node 2 tests/fsdp/cpu_fsdp.py tests/fsdp/saving/streamed.py --dir DIR --out DIR/streamed

DIR is that of alone.py.
"""

import functools
import gc
import time
import tracemalloc
from pathlib import Path

import full_disk
import one_rank
import torch
import torch.distributed as dist
from bitshard import fsdp
from bitshard.weights.inventory import holders
from models import CELLS, LIMIT, adapted, differing_files, reference
from shared import linears, load, logits, name_of, rank, refused, run, same_bytes, start, world
from torch.profiler import ProfilerActivity, profile
from ways import WAYS, assert_same, target_of, whole


def check_base(way, cell, kind, folder):
    """The base, with adapters around it or not, before a forward and behind one, is what one process saves."""
    model = WAYS[way](folder, cell, functools.partial(adapted, kind=kind))
    for moment in ("before", "behind") if way != "parts" else ("before",):
        target = target_of(folder, f"{way}-{name_of(*cell)}-{kind}-{moment}")
        if moment == "behind":
            logits(model)
        fsdp.save_pretrained(model, target, max_shard_size=LIMIT)
        assert_same(target, reference(folder, cell))


def check_merged(way, cell, kind, what, folder):
    """Adapters merged into it; the model keeps its base and its adapters."""
    model = WAYS[way](folder, cell, functools.partial(adapted, kind=kind))
    # DoRA wants other units of FSDP1, and a head in float32 does not fit what comes before it
    readable = way != "parts" and (way, kind) != ("fsdp1", "dora") and kind != "trained"
    before = logits(model) if readable else None
    target = target_of(folder, f"{way}-{name_of(*cell)}-{kind}-{what}")
    dtype = {"4bit": None, "bf16": torch.bfloat16, "fp32": torch.float32}[what]
    fsdp.save_pretrained(model, target, dtype=dtype, merge=kind != "none", max_shard_size=LIMIT)
    assert_same(target, reference(folder, cell, kind, what))
    assert before is None or same_bytes(logits(model), before)


def check_adapter(way, kind, folder):
    """The adapter alone: the files that peft writes in one process; a failure of rank 0 is everybody's."""
    model = WAYS[way](folder, CELLS[0], functools.partial(adapted, kind=kind))
    target = target_of(folder, f"{way}-adapter-{kind}")
    fsdp.save_adapter(model, target)
    if rank() == 0:
        adapted(load(folder, *CELLS[0], device_map="cpu"), kind).save_pretrained(f"{target}-alone")
        assert not differing_files(target, f"{target}-alone"), differing_files(target, f"{target}-alone")
    text = refused(lambda: fsdp.save_adapter(model, f"{target}/adapter_config.json"), "adapter_config.json")
    assert "rank 0 of 2" in text, text
    refused(lambda: fsdp.save_adapter(model, target, selected_adapters=["default"][rank() :]), "different things")


def check_rotten(way, folder):
    """One changed byte on the last rank: all ranks raise, and there is no file."""
    model = WAYS[way](folder, CELLS[0], lambda model: model)
    logits(model)  # what was loaded into shards is known by its checksum then
    name, layer = list(linears(model).items())[3]
    if rank() == world() - 1:
        layer.weight._local_tensor.plain().view(-1).view(torch.uint8)[7] ^= 0x55
    target = target_of(folder, f"{way}-rotten")
    text = refused(lambda: fsdp.save_pretrained(model, target), f"{name}.weight", "checksum")
    assert rank() == 0 or "rank 0 of" in text, text
    dist.barrier()
    assert list(Path(target).iterdir()) == []


def check_adapter_fsdp1(folder):
    """FSDP1 gathers whole units only: an error on all ranks."""
    model = WAYS["fsdp1"](folder, CELLS[0], functools.partial(adapted, kind="lora"))
    refused(lambda: fsdp.save_adapter(model, target_of(folder, "fsdp1-adapter")), "FSDP1", "merge=True")


def check_misuse(folder):
    """What cannot be saved says so, on all ranks alike and without waiting."""
    model = whole(folder, CELLS[0], lambda model: model)
    target = target_of(folder, "misuse")
    save = functools.partial(fsdp.save_pretrained, model, target)
    refused(lambda: save(merge=True), "no adapters")
    refused(lambda: save(dtype=torch.uint8), "dtype=torch.uint8")
    refused(lambda: save(max_shard_size="5 apples"), "5 apples")
    refused(lambda: save(merge=rank() == 1), "no adapters")  # on one rank only
    refused(lambda: save(max_shard_size="5GB" if rank() else "6GB"), "different things")
    assert not Path(target).exists()


def peak_bytes(action):
    """(tensor bytes, bytes of Python's own) that were held at once during `action`, above those before it."""
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
        time.sleep(0.3)  # threads of gloo that still free a tensor when the profiler stops end the process
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    held = peak = 0
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert len(events) > 100
    return peak, python


def check_memory(way, names, folder):
    """Above its shard no rank holds more than one decoder layer at any time, counted in the bytes that are allocated.

    In 4 bits where the base is written as it is; in float32, in which the adapters are, where they are merged. FSDP1,
    whose units are decoder layers, holds one of these beside.
    """
    adapt = functools.partial(adapted, kind="lora")
    model = WAYS[way](f"{folder}/wide", CELLS[0], adapt)
    elements = sum(held.state.shape.numel() for _, held in holders(model))
    layer = elements // 5
    unit = layer // 2 + layer // 8 if "fsdp1" in way else 0  # with scales and its padded parts
    found = {}
    cases = {
        "base": ({}, layer // 2),
        "merged": ({"merge": True}, 4 * layer),
        "values": ({"merge": True, "dtype": torch.bfloat16}, 4 * layer),
    }
    for name in names.split():
        options, bound = cases[name]
        target = target_of(folder, f"{way}-memory-{name}")
        gc.collect()
        found[name] = peak_bytes(lambda target=target, options=options: fsdp.save_pretrained(model, target, **options))
        assert found[name][0] <= bound + unit, (name, found, bound, unit)
        assert found[name][1] < 2_000_000, found
    assert elements // 2 > 2 * (layer // 2 + unit)  # gathering all of it would be seen
    return {"layer": layer, **found}


def cases():
    two, base = world() == 2, CELLS[0]
    found = {}
    ways = (
        ["whole", "cut", "native", "native_sharded", "fsdp1", "fsdp1_orig", "parts"] if two else ["whole", "replicas"]
    )
    for way in ways:
        found[f"base_{way}"] = functools.partial(check_base, way, base, "lora" if way == "native_sharded" else "none")
        found[f"merged_{way}"] = functools.partial(check_merged, way, base, "lora", "4bit")
        found[f"values_{way}"] = functools.partial(check_merged, way, base, "lora", "bf16")
    for way in ("whole", "native"):
        for cell in CELLS[1:]:
            found[f"base_{way}_{name_of(*cell)}"] = functools.partial(check_base, way, cell, "lora")
    for way, kinds in KINDS.items():
        for kind in kinds:
            found[f"merged_{way}_{kind}"] = functools.partial(check_merged, way, base, kind, "4bit")
            found[f"values_{way}_{kind}"] = functools.partial(check_merged, way, base, kind, "bf16")
    found["values_whole_fp32"] = functools.partial(check_merged, "whole", CELLS[1], "lora", "bf16")
    found["values_whole_none"] = functools.partial(check_merged, "whole", base, "none", "bf16")
    for way, kind in ADAPTERS:
        found[f"adapter_{way}_{kind}"] = functools.partial(check_adapter, way, kind)
    for way in ("whole", "native"):
        found[f"rotten_{way}"] = functools.partial(check_rotten, way)
    for way, names in (("whole", "base merged values"), ("native", "base"), ("fsdp1", "base merged")):
        found[f"memory_{way}"] = functools.partial(check_memory, way, names)
    found |= {"adapter_fsdp1": check_adapter_fsdp1, "misuse": check_misuse}
    return found | full_disk.CHECKS | one_rank.CHECKS


# What peft and FSDP can do: DoRA fails in peft's constructor on a model that was sharded first, and peft cannot copy a
# module that FSDP has wrapped.
KINDS = {"whole": ("dora", "bias", "trained"), "cut": ("dora", "bias", "trained"), "native": ("bias",)}
KINDS |= {"fsdp1": ("dora",), "fsdp1_orig": ("bias",)}
ADAPTERS = (("whole", "dora"), ("cut", "trained"), ("native_sharded", "lora"))


if __name__ == "__main__":
    arguments = start()
    run(cases(), arguments)
