"""Updates of one parameter and of many: the C core behind bitsandbytes' names of algorithms, arguments checked.

State is updated in place, in the order of the parameter's elements. A parameter that is not contiguous is updated
through a contiguous copy that is written back. One of float64 is given what a float32 copy of it moves by: the step is
computed in float32, and what the parameter is beyond float32 stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitshard import _C, ops
from bitshard.optim.layout import BLOCKSIZE

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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


def update_all(batches: list[tuple[tuple, list[tuple]]]) -> bool:
    """Update many parameters in one call; False where nothing was done and each must be updated by itself.

    batches: (settings, parameters). settings: (algorithm's number, lr, beta1, beta2, beta3, alpha, eps, weight_decay,
    step, gnorm_scale, skip_zeros); a parameter: (g, p, state1, state2, qmap1, qmap2, absmax1, absmax2), None for what
    it does not have, in the shapes of `update_32bit` and `update_8bit_blockwise`. RuntimeError where a GPU fails.
    """
    try:
        if not _C.optimizer_steps(batches):
            return False
    except RuntimeError as error:
        raise ops.torchs(error) from None
    changed = [entry[1] for _, parameters in batches for entry in parameters]
    try:
        torch.autograd.graph.increment_version(changed)
    except RuntimeError:  # of inference tensors, which have none
        torch.autograd.graph.increment_version([p for p in changed if not p.is_inference()])
    return True


def fits(batches: list[tuple[tuple, list[tuple]]]) -> bool:
    """Whether `update_all` would update these, whose states are paged, where a step has copied those to the device.

    False says nothing about what is wrong, or whether something is: then `check_parameter` and others tell.
    """
    return _C.optimizer_fits(batches)


def update_one(settings: tuple, parameter: tuple) -> None:
    """Update one parameter, given as for `update_all`, by its op. Errors as `check_parameter`."""
    number, lr, beta1, beta2, beta3, alpha, eps, weight_decay, step, gnorm_scale, skip_zeros = settings
    g, p, state1, state2, qmap1, qmap2, absmax1, absmax2 = parameter
    name = next(name for name, known in ops.OPTIMIZERS.items() if known == number)
    betas = (beta1, beta2, beta3, alpha, eps)
    if qmap1 is None:
        rest = (weight_decay, step, lr, gnorm_scale, skip_zeros)
        update_32bit(name, g, p, state1, state2, None, 0.0, 0.0, *betas, *rest)
        return
    maps = (qmap1, qmap2, absmax1, absmax2)
    update_8bit_blockwise(name, g, p, state1, state2, *betas, step, lr, *maps, weight_decay, gnorm_scale, skip_zeros)


def update_32bit(
    name: str,
    g: Tensor,
    p: Tensor,
    state1: Tensor,
    state2: Tensor | None,
    unorm: Tensor | None,
    max_unorm: float,
    param_norm: float,
    beta1: float,
    beta2: float,
    beta3: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    step: int,
    lr: float,
    gnorm_scale: float = 1.0,
    skip_zeros: bool = False,
) -> None:
    """Update p [n] and its float32 state by the gradient g [n] in place.

    state1 [n], AdEMAMix's [2, n]; state2 [n] or None; unorm [1] takes the sum of squares of the update where
    max_unorm > 0, which bounds the update's norm by max_unorm * param_norm. Errors as `check_parameter`.
    """
    check_parameter(p, g)
    work = working(p)
    ops.optimizer_32bit(
        working(g),
        work,
        state1,
        _none(state2, p.device),
        _none(unorm, p.device),
        algorithm(name),
        float(lr),
        float(beta1),
        float(beta2),
        float(beta3),
        float(alpha),
        float(eps),
        float(weight_decay),
        int(step),
        float(max_unorm),
        float(param_norm),
        float(gnorm_scale),
        bool(skip_zeros),
    )
    _write_back(p, work)


def update_8bit_blockwise(
    name: str,
    g: Tensor,
    p: Tensor,
    state1: Tensor,
    state2: Tensor | None,
    beta1: float,
    beta2: float,
    beta3: float,
    alpha: float,
    eps: float,
    step: int,
    lr: float,
    qmap1: Tensor,
    qmap2: Tensor | None,
    absmax1: Tensor,
    absmax2: Tensor | None,
    weight_decay: float = 0.0,
    gnorm_scale: float = 1.0,
    skip_zeros: bool = False,
) -> None:
    """Update p [n] and its 8-bit state by the gradient g [n] in place.

    state1 uint8 [n] with scales absmax1 [ceil(n / 256)] and map qmap1 [256], AdEMAMix's with a leading 2 in the first
    two; state2 the same or None. Errors as `check_parameter`.
    """
    check_parameter(p, g)
    work = working(p)
    ops.optimizer_8bit_blockwise(
        working(g),
        work,
        state1,
        _none(state2, p.device),
        qmap1,
        _none(qmap2, p.device),
        absmax1,
        _none(absmax2, p.device),
        algorithm(name),
        float(lr),
        float(beta1),
        float(beta2),
        float(beta3),
        float(alpha),
        float(eps),
        float(weight_decay),
        int(step),
        float(gnorm_scale),
        bool(skip_zeros),
        BLOCKSIZE,
    )
    _write_back(p, work)
