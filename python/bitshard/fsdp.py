"""Functions for 4-bit weights in sharded models: a line that proves the sharding, state dicts, checkpoints.

Under FSDP2 a registered weight is a DTensor around a `PackedShard`. Its state dict entries are DTensors only: the
packed weight and its scales `Shard(0)`, everything small `Replicate()`. They keep the container's dtype, so that torch
can load them back in place. `full_state_dict` returns whole tensors in the declared `quant_storage`, as in a checkpoint
file.
"""

from bitshard.sharding.checkpoints.adapter_files import save_adapter
from bitshard.sharding.checkpoints.dense import dense_weights
from bitshard.sharding.checkpoints.planner import LoadPlanner, load_checkpoint
from bitshard.sharding.checkpoints.save import save_pretrained
from bitshard.sharding.checkpoints.state_dicts import full_state_dict, load_full_state_dict
from bitshard.sharding.loading.rank0 import load_on_rank0, materialize, send_quant_states
from bitshard.sharding.loading.units import load
from bitshard.sharding.report import Share, describe, measure
from bitshard.sharding.weights.in_place import gather_in_place
from bitshard.sharding.weights.late_adapters import shard_adapters
from bitshard.sharding.weights.rows import quantize
from bitshard.sharding.weights.shardable import shardable

__all__ = [
    "LoadPlanner",
    "Share",
    "dense_weights",
    "describe",
    "full_state_dict",
    "gather_in_place",
    "load",
    "load_checkpoint",
    "load_full_state_dict",
    "load_on_rank0",
    "materialize",
    "measure",
    "quantize",
    "save_adapter",
    "save_pretrained",
    "send_quant_states",
    "shard_adapters",
    "shardable",
]
