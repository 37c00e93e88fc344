"""FSDP2's own record of a parameter, which is private to torch: found, checked, and started over with another weight.

Tried with torch 2.11 and 2.13. Used are `FSDPParam.__init__` with its arguments by name, the attributes of the same
names that it keeps, `_module_info`, `_post_load_hook_handle`, `_unsharded_param`, `sharded_param`,
`reset_sharded_param`; for `only_record` the groups of a unit, and for `gathered_output` the tensors that FSDP2 copies
a gathered unit into.
`tests/sharding/test_fsdp_parts.py` goes through all of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy


def record_of(module: nn.Module, name: str) -> Any:
    """FSDP2's record (FSDPParam) of the parameter `name` of `module`; None if it has none.

    It is found in the hook that the record registers with its module; nothing public leads from a layer to it.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    for hook in module._load_state_dict_post_hooks.values():
        for cell in getattr(hook, "__closure__", None) or ():
            found = cell.cell_contents
            if isinstance(found, FSDPParam) and found._module_info.param_name == name:
                return found
    return None


def only_record(unit: nn.Module) -> Any:
    """The record of the one parameter that this unit of FSDP2 has; None if it has another number of them."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]  # older torch
    records = [record for group in groups if group is not None for record in group.fsdp_params]
    return records[0] if len(records) == 1 else None


def start_over(record: Any, weight: nn.Parameter) -> None:
    """Let the record begin again with `weight` in the place of the parameter that it was made for.

    Its constructor runs with the arguments that it was called with, so all sizes are right; it registers its shard of
    `weight` in the module. RuntimeError where this torch has another constructor.
    """
    try:
        offload = CPUOffloadPolicy(pin_memory=record.pin_memory) if record.offload_to_cpu else OffloadPolicy()
        arguments = {
            "param": weight,
            "module_info": record._module_info,
            "mesh_info": record.mesh_info,
            "post_forward_mesh_info": record.post_forward_mesh_info,
            "device": record.device,
            "shard_placement_fn": None,
            "mp_policy": record.mp_policy,
            "offload_policy": offload,
        }
        record._post_load_hook_handle.remove()
        vars(record).pop("_unsharded_param", None)  # dense, where a forward was tried before the weight was quantized
        record.__init__(**arguments)
    except (AttributeError, TypeError) as error:
        raise RuntimeError(
            f"FSDP2 of torch {torch.__version__} keeps its parameters otherwise than 2.10 to 2.15 do ({error}): a "
            "quantized model cannot be loaded into shards there. Load it as accelerate does, before fully_shard."
        ) from error


def gathered_output(record: Any, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The tensor [numel] that FSDP2 would copy this parameter into when its unit has been gathered, allocated.

    Under a version counter of its own, for its values are no news to autograd. None where the parameter is gathered
    otherwise, with other parameters or by hooks of its own.
    """
    world = record.mesh_info.shard_mesh_size
    if numel != math.prod(record.padded_sharded_param_size) * world or not dtype.is_floating_point:
        return None
    record.init_all_gather_outputs([numel // world], [dtype], world, device)
    record.alloc_all_gather_outputs()
    outputs = record.all_gather_outputs
    return outputs[0].data if len(outputs) == 1 and outputs[0].dtype is dtype else None
