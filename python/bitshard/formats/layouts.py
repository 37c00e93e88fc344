"""Layouts of MXFP4 and NVFP4 weights in files of others: what stands there under which names, byte for byte.

| layout | entries of the weight `K`, or of the layer `L` |
|---|---|
| `GptOss` | `K_blocks` uint8 [E, N, K / 32, 16], `K_scales` uint8 [E, N, K / 32]: stacks in MXFP4 |
| `ModelOpt` | `L.weight` uint8 [N, K / 2], `L.weight_scale` E4M3 [N, K / 16], `L.weight_scale_2` float32 []: NVFP4 |
| `CompressedTensors` | `L.weight_packed` uint8 [N, K / 2], `L.weight_scale` E4M3, `L.weight_global_scale` float32 [1] |

In all of them the first of two codes has the low half of its byte, here the high one, so bytes are those of the files
with their halves exchanged. ModelOpt's global scale is a factor, compressed-tensors' a divisor, of which RN(1 / it) is
the factor. What a layer has besides (`input_scale`, `input_global_scale`) is kept as it is and written back.

Sources: transformers' `integrations/mxfp4.py`, NVIDIA ModelOpt's `torch/quantization/qtensor/nvfp4_tensor.py`,
compressed-tensors' `compressors/quantized_compressors/fp4_quantized.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from bitshard.formats.entries import dtype_name
from bitshard.formats.microscaled import MXFP4_EXPERTS, NVFP4, Microscaled, check_global


class Layout:
    """How files of others have one weight.

    Args:
        kept: entries of its layer that are of no use here: name behind the layer's -> tensor.

    Attributes:
        method: `quant_method` of a config.json whose files are so.
        kind: of the weights.
        packed, scales, whole: what the names of its entries end with, behind the key of the weight without `end`.
        end: of the model's key of a weight.
        others: names of entries that may stand beside them.
    """

    method: str
    kind: Microscaled
    end = ""
    packed: str
    scales: str
    whole: str | None = None
    others: tuple[str, ...] = ()

    def __init__(self, kept: dict[str, Tensor] | None = None):
        self.kept = kept or {}

    @classmethod
    def key_of(cls, name: str, names: Collection[str]) -> str | None:
        """The model's key of the weight whose packed bytes the files have as `name`; None where they have none."""
        stem = name.removesuffix(cls.packed)
        there = name.endswith(cls.packed) and all(stem + end in names for end in cls.needed())
        return stem + cls.end if there else None

    @classmethod
    def packed_in(cls, names: Collection[str]) -> dict[str, str]:
        """{name of packed bytes: the model's key of their weight} of files with tensors of these names."""
        return {name: key for name in names if (key := cls.key_of(name, names)) is not None}

    @classmethod
    def names(cls, key: str) -> list[str]:
        """Names of all entries that the weight `key` can have: packed bytes, scales, and what has no rows."""
        return [key.removesuffix(cls.end) + end for end in cls.ends()]

    @classmethod
    def ends(cls) -> list[str]:
        """What these names end with."""
        return [*cls.needed(), *cls.others]

    @classmethod
    def needed(cls) -> list[str]:
        """What those names end with without which there is no weight, the packed bytes first."""
        return [end for end in (cls.packed, cls.scales, cls.whole) if end is not None]

    @classmethod
    def read(cls, key: str, get: Callable[[str], Tensor | None], dtype: torch.dtype, make: Any) -> tuple:
        """(packed codes uint8 [n, 1], state, layout) of a weight out of its entries.

        Args:
            key: of the weight, for messages and names.
            get: an entry by its name in the files; None where there is none.
            dtype: that the weight dequantizes to.
            make: the class of the state.

        TypeError or ValueError, with the numbers, where shapes, dtypes or scales are not those of the layout.
        """
        stem = key.removesuffix(cls.end)
        found = {end: get(stem + end) for end in cls.ends()}
        if missing := [stem + end for end in cls.needed() if found[end] is None]:
            raise ValueError(f"{key}: {' and '.join(missing)} missing, which files in this layout ({cls.method}) have")
        packed, scales, whole = found[cls.packed], found[cls.scales], found.get(cls.whole)
        shape = cls.shape(key, packed, scales)
        scales, second = scales.reshape(-1).view(torch.uint8).contiguous(), None
        cls.kind.check_scales(scales, None, key)
        if whole is not None:
            if whole.dtype is not torch.float32 or whole.numel() != 1:
                raise ValueError(
                    f"{key}: {cls.whole} is {dtype_name(whole.dtype)} {list(whole.shape)}, expected one float32"
                )
            check_global(whole.reshape(1), key)
            factor = cls._factor(whole.reshape(1).to(scales.device))
            check_global(factor, key)
            second = factor.repeat(cls.kind.second_level(shape))
        state = cls.kind.state(make, scales, second, shape, dtype)
        return exchanged(packed.reshape(-1, 1)), state, cls.of(key, lambda name: found[name.removeprefix(stem)])

    @classmethod
    def of(cls, key: str, get: Callable[[str], Tensor | None]) -> Layout:
        """The layout of a weight, with all of its entries but codes and scales; arguments as of `read`."""
        stem = key.removesuffix(cls.end)
        found = {end: get(stem + end) for end in cls.ends() if end not in (cls.packed, cls.scales)}
        return cls({end: value.clone() for end, value in found.items() if value is not None})

    def written(self, key: str, packed: Tensor, state: Any) -> dict[str, Tensor]:
        """The entries of a whole weight as the files have them; on the meta device, too.

        Args:
            packed: its packed bytes, a contiguous tensor of any dtype with nothing but padding behind them.
        """
        stem, shape = key.removesuffix(self.end), state.shape
        codes = packed.reshape(-1).view(torch.uint8)[: shape.numel() // 2]
        made = {
            stem + self.packed: exchanged(codes).view(self._packed_shape(shape)),
            stem + self.scales: self._scales(state.absmax.view(*shape[:-1], -1)),
        }
        kept = dict(self.kept)
        if self.whole is not None:
            own, had = state.state2.absmax[:1], kept.pop(self.whole, None)
            shape = self._whole_shape() if had is None else had.shape
            if had is None or own.is_meta or not torch.equal(self._factor(had.reshape(1).to(own.device)), own):
                had = self._factor(own).view(shape)  # of other values than the files had
            made[stem + self.whole] = had
        return {**made, **{stem + name: value for name, value in kept.items()}}

    @classmethod
    def shape(cls, key: str, packed: Tensor, scales: Tensor) -> torch.Size:
        """Shape of the weight with these entries, also empty ones; ValueError where they do not fit together."""
        raise NotImplementedError

    @staticmethod
    def _packed_shape(shape: torch.Size) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // 2)

    @staticmethod
    def _scales(scales: Tensor) -> Tensor:
        return scales

    @staticmethod
    def _factor(whole: Tensor) -> Tensor:
        """What codes are multiplied with, of what the files have, and the reverse."""
        return whole

    @staticmethod
    def _whole_shape() -> tuple[int, ...]:
        return ()


class GptOss(Layout):
    """Stacks of gpt-oss in MXFP4, blocks along K."""

    method, kind = "mxfp4", MXFP4_EXPERTS
    packed, scales = "_blocks", "_scales"

    @classmethod
    def shape(cls, key: str, packed: Tensor, scales: Tensor) -> torch.Size:
        fits = packed.dim() == 4 and packed.shape[-1] == 16 and packed.shape[:-1] == scales.shape
        if not fits or 0 in packed.shape[1:] or {packed.dtype, scales.dtype} != {torch.uint8}:
            raise ValueError(
                f"{key}: blocks are {dtype_name(packed.dtype)} {list(packed.shape)} and scales "
                f"{dtype_name(scales.dtype)} {list(scales.shape)}, expected uint8 [E, N, K / 32, 16] and [E, N, K / 32]"
            )
        return torch.Size((*packed.shape[:2], packed.shape[2] * 32))

    @staticmethod
    def _packed_shape(shape: torch.Size) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // 32, 16)


class ModelOpt(Layout):
    """Linear layers of NVIDIA's checkpoints in NVFP4, blocks along K."""

    method, kind = "modelopt", NVFP4
    end = packed = ".weight"
    scales, whole, others = ".weight_scale", ".weight_scale_2", (".input_scale",)

    @classmethod
    def shape(cls, key: str, packed: Tensor, scales: Tensor) -> torch.Size:
        fits = packed.dim() == 2 and scales.dim() == 2 and packed.shape[0] == scales.shape[0]
        fits = fits and packed.shape[1] == 8 * scales.shape[1] > 0
        if not fits or packed.dtype is not torch.uint8 or scales.dtype is not torch.float8_e4m3fn:
            raise ValueError(
                f"{key}: packed codes are {dtype_name(packed.dtype)} {list(packed.shape)} and scales "
                f"{dtype_name(scales.dtype)} {list(scales.shape)}, expected uint8 [N, K / 2] and float8_e4m3fn "
                "[N, K / 16]"
            )
        return torch.Size((packed.shape[0], packed.shape[1] * 2))

    @staticmethod
    def _scales(scales: Tensor) -> Tensor:
        return scales.view(torch.float8_e4m3fn)


class CompressedTensors(ModelOpt):
    """Linear layers of compressed-tensors' checkpoints in NVFP4 ("nvfp4-pack-quantized")."""

    method = "compressed-tensors"
    packed, whole, others = ".weight_packed", ".weight_global_scale", (".input_global_scale",)

    @staticmethod
    def _factor(whole: Tensor) -> Tensor:
        return 1.0 / whole

    @staticmethod
    def _whole_shape() -> tuple[int, ...]:
        return (1,)


LAYOUTS = (GptOss, ModelOpt, CompressedTensors)
QUANTIZATION = "hf_quant_config.json"  # beside files of ModelOpt: what their config says of the format
METHODS = frozenset(layout.method for layout in LAYOUTS)  # `quant_method` of configs whose files may be in one of them


def exchanged(packed: Tensor) -> Tensor:
    """Bytes uint8 with their halves exchanged; a new tensor."""
    return packed << 4 | packed >> 4


def layout_of(names: Collection[str]) -> type[Layout] | None:
    """The layout of files with tensors of these names; None where no weight of theirs is in any of these."""
    names = set(names)
    return next((layout for layout in LAYOUTS if layout.packed_in(names)), None)


def method_of(config: Any) -> str:
    """The quant_method of a quantization config, of transformers' own class or a dict."""
    method = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    return str(getattr(method, "value", method))
