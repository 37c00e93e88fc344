"""LoRA adapters merged into a 4-bit weight, quantized anew: the one definition of the merged bytes (docs/merging.md).

An element of the merged weight is that of W in float32, then for each adapter fma(s, d, value), where d is the sum of
B[n, r] A[r, k] over its ranks, ascending, by float32 fused multiply-adds. The quantizer of W's format makes codes and
scales of it. Nested scales are quantized as `functional.quantize_4bit` does, but for the mean of all scales, which is
summed in float64: the same on a CPU and a GPU. NVFP4's global scale is made anew, of the largest merged value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats.kinds import FOUR_BIT
from bitshard.formats.maps import table
from bitshard.formats.microscaled import MXFP4, NVFP4, Microscaled
from bitshard.formats.state import VALUE_DTYPES, QuantState
from bitshard.functions import functional, microscaled, reordered

Adapter = tuple[Tensor, Tensor, float]  # A [r, K], B [N, r], s; of a stack A [E, r, K], B [E, N, r]
Joined = tuple[Tensor, Tensor, Tensor]  # of `_joined`
_kept: dict[tuple, Tensor] = {}  # what `_scales` has made


def merge_4bit(packed: Tensor, state: QuantState, adapters: Sequence[Adapter]) -> tuple[Tensor, QuantState]:
    """(packed codes, state) of W + the sum of s B A over `adapters`, in their order, in the format of W [N, K].

    Args:
        packed, state: of W, whole: NF4, FP4, MXFP4 or NVFP4, one weight, or a stack [E, N, K].
        adapters: A, B and s; A and B float32, float16 or bfloat16 on the device of W. Of a stack A [E, r, K] and
            B [E, N, r], any strides: each expert has the bytes that it has as a weight of its own.

    ValueError for a weight of another kind, and for factors of other shapes; TypeError for other dtypes.
    """
    check(state)
    return state.kind.merge(packed, state, adapters)


def _into_one(make: Callable[..., Any], packed: Tensor, state: QuantState, adapters: Sequence[Adapter]) -> Any:
    """One weight: `make` of its bytes, its state and the adapters joined."""
    if state.reordered:
        packed, state = reordered.restored(packed, state)
    N, K = state.shape
    for A, B, _ in adapters:
        if A.dim() != 2 or A.shape[1] != K or B.shape != (N, A.shape[0]):
            raise ValueError(f"merge_4bit: A is {list(A.shape)} and B {list(B.shape)}, the weight is [{N}, {K}]")
    joined = _joined(adapters, packed.device, K, N)
    with torch._C.DisableTorchFunctionSubclass():
        return make(packed, state, joined)


def _by_maxima(packed: Tensor, state: QuantState, joined: Joined) -> tuple[Tensor, QuantState]:
    """NF4 and FP4: one op."""
    map = table("dynamic", packed.device) if state.nested else ops.empty(packed.device)
    merged, scales, absmax2, mean = ops.merge_4bit(packed, *state.scales(), *joined, map, *_numbers(state))
    new = QuantState(scales, state.shape, None, state.blocksize, state.quant_type, state.dtype)
    new.share(state.quant_type)
    if state.nested:
        functional.set_nested(new, scales, absmax2, mean.view(()) if len(mean) else absmax2.new_zeros(()))
    return merged, new


def _microscaled(packed: Tensor, state: QuantState, joined: Joined) -> tuple[Tensor, QuantState]:
    """MXFP4 and NVFP4: one op; on CUDA by panels where it takes no such rows."""
    if not _one_op(packed, state):
        return _by_panels(packed, state, joined)
    merged, scales, second = ops.merge_e2m1(packed, *state.scales(), *joined, *_numbers(state))
    second = second if state.kind.has_global else None
    return merged, state.kind.state(QuantState, scales, second, state.shape, state.dtype)


def _one_op(packed: Tensor, state: QuantState) -> bool:
    """Whether `merge_e2m1` takes this weight: on CUDA, rows of whole 64 columns in words of 4 bytes."""
    if not packed.is_cuda:
        return True
    return state.shape[1] % 64 == 0 and (torch.compiler.is_compiling() or packed.data_ptr() % 4 == 0)


def _by_panels(packed: Tensor, state: QuantState, joined: Joined) -> tuple[Tensor, QuantState]:
    """The sum in float32, rows of up to `microscaled.AT_ONCE` elements at a time."""
    N, K = state.shape
    rows = max(microscaled.AT_ONCE // max(K * state.blocksize, 1), 1) * state.blocksize  # whole blocks

    def panels() -> Iterator[Tensor]:
        for row in range(0, max(N, 1), rows):
            numbers = (*_numbers(state), row, min(rows, N - row))
            yield ops.merged_values(packed, *state.scales(), *joined, *numbers).view(-1)

    kept = list(panels()) if N <= rows else None  # for the second pass
    given = panels if kept is None else lambda: kept
    return microscaled.quantize_panels(state.kind, [given], state.shape, state.dtype, packed.dtype)


def _by_expert(packed: Tensor, state: QuantState, adapters: Sequence[Adapter]) -> tuple[Tensor, QuantState]:
    """A stack, one expert at a time."""
    E, N, K = state.shape
    for A, B, _ in adapters:
        if A.dim() != 3 or A.shape[::2] != (E, K) or B.shape != (E, N, A.shape[1]):
            raise ValueError(f"merge_4bit: A is {list(A.shape)} and B {list(B.shape)}, the stack is [{E}, {N}, {K}]")
    merged, states = torch.zeros_like(packed), []
    codes = merged.view(-1).view(torch.uint8)[: state.shape.numel() // 2].view(E, -1)
    for expert in range(E):
        own, of = functional.expert_of(packed, state, expert)
        own, of = merge_4bit(own, of, [(A[expert], B[expert], s) for A, B, s in adapters])
        codes[expert].copy_(own.view(-1))
        states.append(of)
    new = state.clone()
    new.absmax, new.checksum = torch.cat([of.absmax for of in states]), None
    if state.nested:
        new.state2.absmax = torch.cat([of.state2.absmax for of in states])
        new.offset = torch.stack([of.offset.view(()) for of in states])
    return merged, new


def _numbers(state: QuantState) -> tuple[int, int, int, int]:
    return state.blocksize, ops.CODES[state.quant_type], *state.shape


for _kind, _make in ((FOUR_BIT, _by_maxima), (MXFP4, _microscaled), (NVFP4, _microscaled)):
    _kind.merge, _kind.stack.merge = partial(_into_one, _make), _by_expert


def check(state: QuantState) -> None:
    """ValueError unless adapters can be merged so into a weight of this state."""
    if state.kind.merge is None:
        raise ValueError(
            "merging with the bytes of merge-aware training is for NF4, FP4, MXFP4 and NVFP4 weights, this one is "
            f"{state.quant_type or state.kind.word}"
        )


def require_numbers(state: QuantState) -> None:
    """ValueError where scales of merged MXFP4 and NVFP4 are not finite, which nothing reads. Waits for a GPU."""
    if isinstance(state.kind, Microscaled):
        second = state.state2.absmax if state.kind.has_global else None
        state.kind.check_scales(state.absmax, second, "W + s B A is not finite")


def _joined(adapters: Sequence[Adapter], device: torch.device, K: int, N: int) -> Joined:
    """A of all adapters [R, K], B [N, R], and s at the last rank of each, 0 at the others [R]; one dtype."""
    factors = [(A.detach(), B.detach(), float(s)) for A, B, s in adapters if A.shape[0] and s]
    dtypes = {tensor.dtype for A, B, _ in factors for tensor in (A, B)}
    if not dtypes <= set(VALUE_DTYPES.values()):
        raise TypeError(f"merge_4bit: adapters are {dtypes}, expected float32, float16 or bfloat16")
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # which holds the numbers of all
    scales = _scales(tuple((A.shape[0], s) for A, _, s in factors), device)
    if not factors:
        return scales.new_empty(0, K), scales.new_empty(N, 0), scales
    As, Bs = ([pair[i].to(dtype).contiguous() for pair in factors] for i in (0, 1))
    return *(each[0] if len(each) == 1 else torch.cat(each, dim) for dim, each in enumerate((As, Bs))), scales


def _scales(of: tuple[tuple[int, float], ...], device: torch.device) -> Tensor:
    """s at the last rank of each adapter of (rank, s): kept, for it is copied to the device."""
    found = None if torch.compiler.is_compiling() else _kept.get((of, device))
    if found is None:
        numbers = [value for rank, s in of for value in (*[0.0] * (rank - 1), s)]
        with torch.inference_mode(False):
            found = torch.tensor(numbers, dtype=torch.float32, device=device)
        if type(found) is Tensor and len(_kept) < 256:  # under a fake mode it would be fake, and outlive the mode
            _kept[of, device] = found
    return found
