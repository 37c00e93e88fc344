"""MXFP4 and NVFP4: codes E2M1 in short blocks, whose scales are 8-bit floats.

    value = RN(code * scale),  scale = RN(map[byte of its block] * global scale)      in float32, then one more rounding

MXFP4: blocks of 32, scales E8M0, the powers of two 2^(byte - 127), and a global scale of 1 (OCP Microscaling Formats
v1.0). NVFP4: blocks of 16, scales E4M3, a float32 for all of them. To the C core these are nested scales: the map is
that of the 8-bit floats, the second level repeats the global scale for each 256 blocks, and the offset is 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats import entries
from bitshard.formats.kind import register
from bitshard.formats.kinds import ExpertStack, FourBit

_LARGEST_EXPONENT = 252  # 6 * 2^(252 - 127) is the largest power whose multiples float32 and bfloat16 hold
LARGEST_CODE, LARGEST_SCALE = 6.0, 448.0  # of E2M1, and of E4M3
_NAN = 0x7F  # of E4M3; above it are negative numbers


class Microscaled(FourBit):
    """One weight in MXFP4 or NVFP4.

    Attributes:
        scale_table: "e8m0" or "e4m3": what a byte of `QuantState.absmax` stands for.
        has_global: whether there is a global scale: `QuantState.state2.absmax`, one float32 for 256 blocks.
    """

    nests = False

    def __init__(self, quant_type: str, blocksize: int, scale_table: str, has_global: bool):
        self.name, self.quant_types = quant_type, (quant_type,)
        self.blocksize, self.blocksizes = blocksize, (blocksize,)
        self.scale_table, self.has_global = scale_table, has_global
        self.by_blocks = not has_global

    def state(
        self, cls: Any, scales: Tensor, global_scale: Tensor | None, shape: torch.Size, dtype: torch.dtype
    ) -> Any:
        """The state, made by `cls`, of a tensor that dequantizes to `dtype`.

        Args:
            scales: uint8 [blocks].
            global_scale: float32, one for each 256 blocks (of each weight of a stack); None: 1.
        """
        count = self.second_level(shape)
        if global_scale is None:
            global_scale = torch.ones(count, dtype=torch.float32, device=scales.device)
        offset = torch.zeros(shape[:1] if self.stacked else (), dtype=torch.float32, device=scales.device)
        second = cls(absmax=global_scale, blocksize=entries.NESTED_BLOCKSIZE, dtype=torch.float32)
        second.share(self.scale_table)
        state = cls(scales, torch.Size(shape), None, self.blocksize, self.name_of_type, dtype, offset, second)
        state.share(self.name_of_type)
        state.kind = self
        return state

    @property
    def name_of_type(self) -> str:
        """The name of the format."""
        return self.quant_types[0]

    @property
    def largest_scale(self) -> int:
        """The byte of the largest scale."""
        return _NAN - 1 if self.has_global else _LARGEST_EXPONENT

    def second_level(self, shape: torch.Size) -> int:
        """Scales of the second level."""
        parts = shape[0] if self.stacked else 1
        blocks = ops.block_count(math.prod(shape), self.blocksize) // parts
        return parts * ops.block_count(blocks, entries.NESTED_BLOCKSIZE)

    def check_state(self, packed: Tensor, state: Any, where: str) -> None:
        super().check_state(packed, state, where)
        if not state.nested:
            raise ValueError(f"{where}: scales of {self.name_of_type} without the second level that this kind has")

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the entries of checkpoints that are tensors of a state."""
        return ("absmax", "nested_absmax") if self.has_global else ("absmax",)

    def tensors(self, state: Any) -> dict[str, Tensor]:
        return dict(zip(self.own, (state.absmax, state.state2.absmax), strict=False))

    def entry_names(self) -> list[str]:
        """Names of the entries of a state, as checkpoints have them."""
        return [*self.own, f"quant_state.{entries.BLOB_PREFIX}{self.name_of_type}"]

    def read(self, cls: Any, given: dict[str, Any]) -> Any:
        blocksize, shape = entries.integer(given, "blocksize"), entries.read_shape(given)
        if blocksize != self.blocksize:
            raise ValueError(
                f"quantization state: blocksize is {entries.short(blocksize)}, {self.name_of_type} has {self.blocksize}"
            )
        self.check_shape(shape, blocksize)
        if others := sorted(name for name in entries.TENSOR_KEYS if name in given and name not in self.own):
            raise ValueError(f"quantization state: {self.name_of_type} has {list(self.own)}, and no {others}")
        count = ops.block_count(math.prod(shape), blocksize)
        absmax = entries.vector(given, "absmax", (torch.uint8,), count, f"a scale for {blocksize} of {list(shape)}")
        second = None
        if self.has_global:
            why = f"the global scale for each 256 of {count} scales"
            second = entries.vector(given, "nested_absmax", (torch.float32,), self.second_level(shape), why)
        self.check_scales(absmax, second)
        return self.state(cls, absmax.contiguous(), second, shape, entries.value_dtype(given, "dtype"))

    def check_scales(self, scales: Tensor, global_scale: Tensor | None, where: str = "quantization state") -> None:
        """ValueError, with the numbers, for scales that are no numbers, too large or negative; of real tensors.

        Args:
            scales: uint8. global_scale: float32, or None.
        """
        if scales.is_meta or scales.numel() == 0:
            return
        most = self.largest_scale
        largest = int(scales.max())
        if largest > most:
            what = "NaN or negative" if self.has_global else f"NaN or 2^{largest - 127}, beyond what float32 holds"
            count = int((scales > most).sum())
            raise ValueError(
                f"{where}: {count} of {scales.numel()} scales of {self.name_of_type} are {what}: byte {largest}, "
                f"expected at most {most}"
            )
        if global_scale is not None:
            check_global(global_scale, where)


def check_global(global_scale: Tensor, where: str) -> None:
    """ValueError, with the first wrong one, for global scales float32 that are not positive and finite."""
    if global_scale.is_meta:
        return
    wrong = global_scale[~((global_scale > 0) & (global_scale < math.inf))]
    if wrong.numel():
        raise ValueError(f"{where}: the global scale is {float(wrong[0])}, expected a positive finite number")


class MicroscaledStack(Microscaled, ExpertStack):
    """A stack of experts [E, N, K] in MXFP4 or NVFP4, each a weight of its own; N K is a multiple of the blocksize."""

    def __init__(self, one: Microscaled):
        super().__init__(one.name_of_type, one.blocksize, one.scale_table, one.has_global)
        self.name = f"{one.name}_experts"
        one.stack = self


MXFP4 = Microscaled("mxfp4", 32, "e8m0", False)
NVFP4 = Microscaled("nvfp4", 16, "e4m3", True)
MXFP4_EXPERTS, NVFP4_EXPERTS = MicroscaledStack(MXFP4), MicroscaledStack(NVFP4)
ALL = (MXFP4, NVFP4, MXFP4_EXPERTS, NVFP4_EXPERTS)
register(*ALL)
