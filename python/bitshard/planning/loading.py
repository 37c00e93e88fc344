"""The most that is there while a model is loaded, what lies on the host, and what goes over the links."""

from __future__ import annotations

from bitshard.planning.memory import VOCABULARY, Memory


def loading(memory: Memory) -> dict[str, float] | None:
    """{phase: most bytes on one GPU}: "load", and "prepare", where the loaded model is sharded.

    Of files in 16 bits; packed ones need less by the largest tensor. None for weights on the host: not known.
    """
    if memory.job.offload_weights:
        return None
    tensor = _largest(memory)
    whole, shard = sum(memory.whole().values()), sum(memory.shard().values())
    adapters = sum(map(memory.adapters_of, (*memory.layers, memory.units.rest)))
    if memory.ranks == 1:
        return {"load": whole + tensor, "prepare": whole + adapters}
    if memory.job.way == "native":
        return {"load": shard + tensor / memory.ranks, "prepare": shard + adapters}
    if memory.job.way == "parts":  # embeddings and head are whole until the last unit is sharded, and then shards too
        vocabulary = memory.whole()[VOCABULARY]
        kept = shard - vocabulary / memory.ranks + vocabulary
        return {"load": kept + tensor, "prepare": kept + vocabulary / memory.ranks + adapters * (1 + 1 / memory.ranks)}
    sharded = shard if memory.job.sharding == "fsdp2" else max(map(memory.gathered, memory.layers))
    return {"load": whole + tensor, "prepare": whole + adapters + sharded}


def _largest(memory: Memory) -> float:
    """Bytes of the largest tensor that is quantized, in 16 bits; 0 where none is. transformers sends one that becomes
    8-bit to the host and back, and has both copies on the GPU then."""
    units, copies = (*memory.layers, memory.units.rest), 2.0 if memory.job.bits == 8 else 1.0
    return copies * 2.0 * max([weight.elements for unit in units for weight in unit.packed], default=0)


def host(memory: Memory) -> dict[str, float]:
    """{what: bytes in host memory of each process}, beyond its imports and the page cache."""
    job, found = memory.job, {}
    if job.offload_weights:
        found["weights"] = sum(memory.shard().values()) - sum(memory.resident().values())
    if job.offload_activations and job.checkpointing:
        found["activations"] = float(sum(layer.kept for layer in memory.played()))
    if job.paged:
        found["states of the optimizer"] = memory.states()
    return found


def links(memory: Memory) -> dict[str, float]:
    """{link: bytes that one GPU gets over it in a step}: from other GPUs, and from and to the host."""
    job, units = memory.job, memory.units
    others = (memory.ranks - 1) / memory.ranks
    gathers = 2 * sum(map(memory.gathered, memory.layers)) + memory.gathered(units.rest)
    heads = 2 if job.vocabulary == "in_place" else 1
    if job.vocabulary == "split":
        gathers += 16.0 * job.seq * job.batch * units.hidden * memory.ranks  # states of all ranks, and their gradients
    else:
        gathers += (units.embeddings * (1 if units.tied else 2)) + heads * memory.head()
    found = {"other GPUs": others * (gathers + sum(map(memory.adapters_of, memory.layers)))}
    away = host(memory)
    found["host"] = 2 * away.get("weights", 0.0) + 2 * away.get("activations", 0.0)
    found["host"] += 2 * away.get("states of the optimizer", 0.0)
    return {link: size for link, size in found.items() if size}
