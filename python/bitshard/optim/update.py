"""Updates of one parameter and of many, by the C core: `Settings`, equal for many parameters, and `Tensors` of each.

State is updated in place, in the order of the parameter's elements. A parameter that is not contiguous is updated
through a contiguous copy that is written back. One of float64 is given what a float32 copy of it moves by: the step is
computed in float32, and what the parameter is beyond float32 stays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bitshard import _C, ops
from bitshard.optim.shards import BLOCKSIZE

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Settings(NamedTuple):
    """What a step is made with; formulas: csrc/core/optimizer.h. In the order in which the C core reads it.

    Attributes:
        algorithm: its number, `algorithm(name)`.
        alpha: what AdEMAMix's slow mean counts; 0 elsewhere.
        step: number of this step, from 1 on.
        gnorm_scale: factor of the gradient.
        skip_zeros: elements whose gradient is 0 stay as they are.
    """

    algorithm: int
    lr: float
    beta1: float
    beta2: float
    beta3: float
    alpha: float
    eps: float
    weight_decay: float
    step: int
    gnorm_scale: float = 1.0
    skip_zeros: bool = False


class Tensors(NamedTuple):
    """Gradient g, parameter p [n] and the state of one update. In the order in which the C core reads it.

    32 bits: state1 and state2 float32 [n]. 8 bits: codes uint8 [n] with maps qmap float32 [256] and scales absmax
    [ceil(n / 256)]. AdEMAMix's state1 and absmax1 have a leading 2. None for what there is not.
    """

    g: Tensor
    p: Tensor
    state1: Tensor
    state2: Tensor | None = None
    qmap1: Tensor | None = None
    qmap2: Tensor | None = None
    absmax1: Tensor | None = None
    absmax2: Tensor | None = None


class Bound(NamedTuple):
    """What bounds the norm of a 32-bit update by max_unorm * param_norm; unorm [1] takes its sum of squares."""

    unorm: Tensor | None = None
    max_unorm: float = 0.0
    param_norm: float = 0.0


UNBOUNDED = Bound()
Batches = list[tuple[Settings, list[Tensors]]]


def algorithm(name: str) -> int:
    """Number of an algorithm for the ops; ValueError for an unknown name."""
    if name not in ops.OPTIMIZERS:
        raise ValueError(f"Unsupported optimizer name: {name}. Supported optimizers: {list(ops.OPTIMIZERS)}")
    return ops.OPTIMIZERS[name]


def check_device(device: torch.device) -> None:
    """NotImplementedError where there is no kernel."""
    if device.type not in ("cpu", "cuda"):
        kind = device.type.upper()
        raise NotImplementedError(f"optimizer kernels for {kind} are not there yet: use optim='adamw_torch_fused'")


def check_parameter(p: Tensor, g: Tensor) -> None:
    """TypeError or ValueError where a local parameter and its gradient cannot be used."""
    for name, tensor in (("parameter", p), ("gradient", g)):
        if tensor.layout is not torch.strided:
            raise TypeError(f"the {name} is sparse ({tensor.layout}), which these optimizers do not take")
        if tensor.dtype not in FLOATS:
            raise TypeError(f"the {name} is {tensor.dtype}; float32, float16, bfloat16 and float64 are supported")
    if p.device != g.device:
        raise ValueError(f"the parameter is on {p.device}, its gradient on {g.device}")
    if p.numel() != g.numel():
        raise ValueError(f"the parameter has shape {tuple(p.shape)}, its gradient {tuple(g.shape)}")
    if not p.is_contiguous() and torch._debug_has_internal_overlap(p) == 1:
        raise ValueError(f"elements of the parameter share memory (stride {p.stride()}): it cannot be updated in place")
    if _overlap(p, g):
        raise ValueError("the parameter and its gradient share memory: it cannot be updated in place")
    check_device(p.device)


def _overlap(p: Tensor, g: Tensor) -> bool:
    """Whether two contiguous tensors have bytes in common; of others the kernels get copies."""
    if p.is_meta or not p.numel() or not (p.is_contiguous() and g.is_contiguous()):
        return False
    p_begin, g_begin = p.data_ptr(), g.data_ptr()
    return p_begin < g_begin + g.nbytes and g_begin < p_begin + p.nbytes


def working(tensor: Tensor) -> Tensor:
    """What the kernels take in the place of a parameter or a gradient: itself, or a contiguous or float32 copy."""
    return tensor.float().contiguous() if tensor.dtype is torch.float64 else tensor.contiguous()


def give_back(p: Tensor, work: Tensor) -> None:
    """Let `p` be what `work`, its copy (`working`), has become."""
    if p.dtype is torch.float64:
        p.add_(work.double().sub_(p.float()))  # exact: the difference of two float32 numbers
    else:
        p.copy_(work)


def _write_back(p: Tensor, work: Tensor) -> None:
    """`p` has changed, by way of `work`; autograd, which sees no kernel, is told."""
    if work is not p:
        give_back(p, work)
    elif not p.is_inference():
        torch.autograd.graph.increment_version(p)


def _none(tensor: Tensor | None, device: torch.device) -> Tensor:
    return ops.empty(device) if tensor is None else tensor


def update_all(batches: Batches) -> bool:
    """Update many parameters in one call; False where nothing was done and each must be updated by itself.

    RuntimeError where a GPU fails.
    """
    try:
        if not _C.optimizer_steps(batches):
            return False
    except RuntimeError as error:
        raise ops.torchs(error) from None
    changed = [tensors[1] for _, parameters in batches for tensors in parameters]
    try:
        torch.autograd.graph.increment_version(changed)
    except RuntimeError:  # of inference tensors, which have none
        torch.autograd.graph.increment_version([p for p in changed if not p.is_inference()])
    return True


def fits(batches: Batches) -> bool:
    """Whether `update_all` would update these, whose states are paged, where a step has copied those to the device.

    False says nothing about what is wrong, or whether something is: then `check_parameter` and others tell.
    """
    return _C.optimizer_fits(batches)


def update(settings: Settings, tensors: Tensors, bound: Bound = UNBOUNDED) -> None:
    """Update one parameter and its state in place, by its op. Errors as `check_parameter`."""
    g, p, state1, *rest = tensors
    check_parameter(p, g)
    work = working(p)
    state2, qmap1, qmap2, absmax1, absmax2, unorm = (_none(tensor, p.device) for tensor in (*rest, bound.unorm))
    number, *numbers, step, gnorm_scale, skip_zeros = settings
    numbers = (number, *map(float, numbers), int(step))
    last = (float(gnorm_scale), bool(skip_zeros))
    if tensors.qmap1 is None:
        limits = (float(bound.max_unorm), float(bound.param_norm))
        ops.optimizer_32bit(working(g), work, state1, state2, unorm, *numbers, *limits, *last)
    else:
        codes = (state1, state2, qmap1, qmap2, absmax1, absmax2)
        ops.optimizer_8bit_blockwise(working(g), work, *codes, *numbers, *last, BLOCKSIZE)
    _write_back(p, work)
