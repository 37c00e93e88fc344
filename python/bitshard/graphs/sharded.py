"""FSDP2 around and inside a graph: its streams, its record of what is gathered, its settings.

A graph contains FSDP2's gathers, copies and reductions as FSDP2 launches them. FSDP2's own record must be that of a
model between two steps before a graph is recorded or launched, and is so again afterwards, for its hooks run while it
is recorded. Beyond torch's public functions this reads and sets the attributes below, nothing else. Where one is
missing the model runs without graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.shards import gather

# Read or set here. What only some releases have, and is emptied where it exists, stands in `_CLEARED` and `_EMPTIED`.
STATE = ("_state_ctx", "_comm_ctx", "_training_state")
CONTEXT = ("iter_forward_root", "post_backward_final_callback_queued", "is_last_backward")
COMMUNICATION = ("all_gather_stream", "all_gather_copy_in_stream", "reduce_scatter_stream", "post_forward_order")
GROUP = ("fsdp_params", "reduce_grads", "all_reduce_grads", "reshard_after_backward", "offload_policy", "mesh_info")
GROUP += (
    "_reshard_after_forward",
    "_training_state",
    "_all_gather_result",
    "_post_forward_indices",
    "_to_sharded",
    "_partial_reduce_output",
)
# By which a group gathers and reduces; some only in later releases.
SETTINGS = ("reduce_grads", "reshard_after_backward", "unshard_async_op", "unshard_in_backward")
SETTINGS += ("gradient_divide_factor", "reduce_scatter_unused_params", "force_sum_reduction_for_comms")
PARAMETER = ("sharded_param", "_sharded_param_data", "_sharding_spec")
# What an interrupted step leaves: each is emptied, whatever the release calls it.
_CLEARED = ("all_gather_state", "reduce_scatter_state", "_all_gather_result", "_post_reduce_event", "_all_reduce_state")
_CLEARED += ("_reshard_after_forward_event", "_partial_reduce_output")
_EMPTIED = ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order", "_post_forward_indices")


class Sharded:
    """FSDP2's units in a model, after its first forward."""

    def __init__(self, model: nn.Module):
        self.units = [module for module in model.modules() if _is_unit(module)]
        states = {id(unit._get_fsdp_state()): unit._get_fsdp_state() for unit in self.units}
        self._states = list(states.values())
        self.groups = [group for state in self._states for group in _groups(state)]
        self.parameters = [param for group in self.groups for param in group.fsdp_params]

    def __bool__(self) -> bool:
        return bool(self.units)

    def managed(self) -> set[int]:
        """Ids of the sharded parameters."""
        return {id(param.sharded_param) for param in self.parameters}

    def ready(self) -> bool:
        """Whether FSDP2 has run: it finds its root, and makes its streams, in the first forward."""
        return all(getattr(state, "_is_root", False) is not None for state in self._states)

    def missing(self) -> str | None:
        """What this release of FSDP2 does not have of the attributes that are needed, in words."""
        wanted = [(self._states, STATE), (self.groups, GROUP), (self.parameters, PARAMETER)]
        wanted += [([s._state_ctx for s in self._states if hasattr(s, "_state_ctx")], CONTEXT)]
        wanted += [([s._comm_ctx for s in self._states if hasattr(s, "_comm_ctx")], COMMUNICATION)]
        for objects, names in wanted:
            for each in objects[:1]:
                for name in names:
                    if not hasattr(each, name):
                        return f"FSDP2 of torch {torch.__version__} has no {type(each).__name__}.{name}"
        return None

    def never(self, on_gpu: bool) -> str | None:
        """Why a step of these units can't be a graph."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        if (words := self.missing()) is not None:
            return words
        if any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in self.groups):
            return "its weights are offloaded to the CPU, which a graph can't repeat (fsdp_offload_params)"
        if on_gpu and (backend := next((b for b in self._backends() if "nccl" not in b), None)) is not None:
            return f"its collectives run by {backend}, of which a graph has none: it needs NCCL"
        if torch.distributed.get_debug_level() is torch.distributed.DebugLevel.DETAIL:
            return "TORCH_DISTRIBUTED_DEBUG=DETAIL compares the ranks at each collective, which a graph does not call"
        hooked = any(getattr(param.sharded_param, "_post_accumulate_grad_hooks", None) for param in self.parameters)
        return "hooks on sharded gradients (an optimizer's step in the backward)" if hooked else None

    def not_now(self) -> str | None:
        """Why the next step must not be a graph, though another may."""
        if not all(state._state_ctx.is_last_backward for state in self._states):
            return "set_is_last_backward(False)"
        if not all(group.all_reduce_grads and group._partial_reduce_output is None for group in self.groups):
            return "set_requires_all_reduce(False)"
        return None

    def _backends(self) -> Iterator[str]:
        meshes = {id(group.mesh_info.mesh): group.mesh_info.mesh for group in self.groups}
        for mesh in meshes.values():
            for dim in range(mesh.ndim):
                yield torch.distributed.get_backend_config(mesh.get_group(dim))

    def streams(self) -> list[Any]:
        """The streams on which FSDP2 gathers and reduces."""
        contexts = {id(state._comm_ctx): state._comm_ctx for state in self._states}
        found = [value for context in contexts.values() for value in vars(context).values()]
        return [value for value in found if isinstance(value, torch.cuda.Stream)]

    def between_steps(self) -> None:
        """Shard what the last forward left whole: the root, and the last unit, where no backward followed."""
        for unit in self.units:
            unit.reshard()

    def reduce_always(self) -> None:
        """Reduce gradients in each backward, also of a step that accumulates: a graph knows of no whole ones.

        The sum of reduced gradients is the reduced sum. accelerate's `no_sync` switches this off for each step but the
        last, and on again.
        """
        for unit in self.units:
            if not all(group.reduce_grads for group in _groups(unit._get_fsdp_state())):
                unit.set_requires_gradient_sync(True, recurse=False)

    def seen(self) -> list[Any]:
        """What a graph has inside beside what `watched.seen` tells: the memory that is gathered, and how."""
        found: list[Any] = [[vars(group).get(name) for name in SETTINGS] for group in self.groups]
        found += [group._reshard_after_forward for group in self.groups]
        found += [param._sharded_param_data.data_ptr() for param in self.parameters]
        return found

    def abandon(self) -> None:
        """Bring FSDP2's record to that between two steps after an error in the middle of one."""
        idle = self._states[0]._training_state.__class__.IDLE if self._states else None
        for each in (*(state._comm_ctx for state in self._states), *self.groups):
            for name in _CLEARED:
                if name in vars(each):
                    setattr(each, name, None)
            for name in _EMPTIED:
                if name in vars(each):
                    getattr(each, name).clear()
        for state in self._states:
            state._training_state = idle
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            getattr(state, "_modules_to_run_forward", set()).clear()
        for group in self.groups:
            group._training_state = idle
            group._to_sharded()
        for param in self.parameters:
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


def _is_unit(module: nn.Module) -> bool:
    return hasattr(type(module), "_get_fsdp_state")


def _groups(state: Any) -> list[Any]:
    """The groups of parameters of one unit: one before torch 2.12, which has a list."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def part(gradient: Tensor) -> Tensor:
    """This process's part of a gradient."""
    return gradient._local_tensor if gather.is_dtensor(gradient) else gradient
