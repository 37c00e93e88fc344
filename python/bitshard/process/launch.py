"""What the environment of this process says about sharding, and what this means for loading.

This module answers three questions. Does FSDP shard in this process (`fsdp_launch`)? Does sharding begin now
(`sharding_begins`)? Does each rank keep only its part of a 4-bit weight that is being loaded (`keeps_parts`)?
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from bitshard import ops

logger = logging.getLogger("bitshard")

_TRUE, _FALSE = ("1", "true", "yes", "y", "on", "t"), ("0", "false", "no", "n", "off", "f")
# accelerate's mesh dimensions beside the one that FSDP shards over
_OTHER_DIMS = ("DP_REPLICATE", "TP", "CP", "SP")
_READ_AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers' switch

_sharded = False  # a 4-bit weight of this process has been sharded by FSDP2
_turned_off_read_ahead = False
_waiting: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # layers on the meta device: elements
_warned_of_fsdp1 = False


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in _TRUE


def world() -> int:
    """Processes of the default process group; 1 where there is none."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def fsdp_launch() -> bool:
    """Whether FSDP shards in this process, by the environment.

    True if accelerate's switch is set, or the variable that `TrainingArguments(fsdp=...)` sets (to true or false).
    Being launched by torchrun is not enough: DDP and DeepSpeed shard no packed weight.
    """
    if _flag("ACCELERATE_USE_DEEPSPEED"):
        return False
    return _flag("ACCELERATE_USE_FSDP") or "FSDP_CPU_RAM_EFFICIENT_LOADING" in os.environ


def sharding_begins() -> bool:
    """Whether accelerate is about to shard the weights of this process: its switch, and a process group."""
    distributed = torch.distributed
    return _flag("ACCELERATE_USE_FSDP") and distributed.is_available() and distributed.is_initialized()


def keeps_parts() -> bool:
    """Whether each rank keeps only its part of a 4-bit weight that is being loaded: what `fully_shard` will leave it.

    True if accelerate's FSDP2 shards over all processes, its efficient loading is on, a process group exists, and no
    model has been sharded yet: a later model (to merge, to evaluate on rank 0) is loaded whole. `BITSHARD_CUT=0` and
    `=1` override everything except the process group. ValueError for any other value.
    """
    asked = os.environ.get("BITSHARD_CUT", "").lower()
    if asked and asked not in (*_TRUE, *_FALSE):
        raise ValueError(f"BITSHARD_CUT={asked}: expected 0 (whole weights), 1 (parts), or nothing")
    if asked in _FALSE or world() == 1:
        return False
    if asked:
        return True
    return not _sharded and _accelerate_fsdp2() and _flag("FSDP_CPU_RAM_EFFICIENT_LOADING")


def _accelerate_fsdp2() -> bool:
    """Whether accelerate's FSDP2 shards over all processes."""
    if not (_flag("ACCELERATE_USE_FSDP") and fsdp_launch() and os.environ.get("FSDP_VERSION") == "2"):
        return False
    return all(os.environ.get(f"PARALLELISM_CONFIG_{dim}_SIZE", "1") == "1" for dim in _OTHER_DIMS)


def note_sharding(loading: bool = False) -> None:
    """FSDP2 has sharded a packed weight: models that are loaded from now on are whole.

    `loading`: the model was sharded before its weights were loaded, so the count of waiting elements stays.
    """
    global _sharded, _turned_off_read_ahead
    _sharded = True
    if not loading:
        _waiting.clear()
    if _turned_off_read_ahead:
        _turned_off_read_ahead = False
        os.environ.pop(_READ_AHEAD, None)


def layer_waits(layer: Any, elements: int) -> None:
    """A 4-bit `layer` with a weight of `elements` was built on the meta device, as transformers does before it loads.

    transformers' threads read pre-quantized files ahead onto the GPU. The whole model may be on the GPU before a rank
    has kept its part of the first weight. While parts are kept, its own switch turns this off, unless it is already
    set.
    """
    _waiting[layer] = elements
    if not _turned_off_read_ahead and keeps_parts():
        read_in_order()


def waiting_elements() -> int:
    """Elements of all 4-bit layers that were built on the meta device and still exist, until one is sharded."""
    return sum(_waiting.values())


def read_in_order() -> None:
    """Disable transformers' reading ahead until a weight has been sharded, unless the environment sets its switch."""
    global _turned_off_read_ahead
    if _READ_AHEAD not in os.environ:
        os.environ[_READ_AHEAD] = "1"
        _turned_off_read_ahead = True


@contextlib.contextmanager
def counting_memory() -> Iterator[None]:
    """While a 4-bit weight is loaded: running out of memory says how much all of them need."""
    try:
        yield
    except RuntimeError as error:
        waiting = waiting_elements()
        if waiting == 0 or not ops.is_out_of_memory(error):
            raise
        whole = _packed_gib(waiting)
        raise type(error)(
            f"{error} It ran out while the 4-bit weights of a model were loaded: with their scales these are "
            f"{whole:.2f} GiB, {whole / world():.2f} for each of {world()} ranks where they are sharded, beside what "
            "stays in 16 bits. docs/fsdp.md of bitshard has the ways to load a rank's part only."
        ) from error


def _packed_gib(elements: int) -> float:
    """GiB of 4-bit weights of so many elements with nested scales."""
    return elements * (0.5 + 1 / 64) / 2**30


def first_rank() -> bool:
    """Whether this process says what all would say: rank 0, or one alone."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def loading() -> None:
    """Called for the first weights. accelerate's FSDP1 needs them whole: log once how much memory that takes."""
    global _warned_of_fsdp1
    if _warned_of_fsdp1 or not sharding_begins() or os.environ.get("FSDP_VERSION", "1") != "1" or world() == 1:
        return
    _warned_of_fsdp1 = True
    if torch.distributed.get_rank() == 0 and waiting_elements() > 0:
        needed = _packed_gib(waiting_elements())
        logger.log(
            logging.WARNING if needed >= 1 else logging.INFO,
            "FSDP1 takes a model that is whole on every GPU: about %.2f GiB of 4-bit weights and scales, and all other "
            "weights, until it is sharded. With FSDP2 (fsdp_version: 2) and fsdp_cpu_ram_efficient_loading: true each "
            "rank keeps only its part of the 4-bit weights from loading on.",
            needed,
        )
