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

from bitshard.formats.entries import NESTED_BLOCKSIZE, dtype_name
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
        refused: those under which products are other than those of the weight alone.
    """

    method: str
    kind: Microscaled
    end = ""
    packed: str
    scales: str
    whole: str | None = None
    others: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

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
    def scale_names(cls, key: str) -> list[str]:
        """Names of what the codes of the weight `key` are multiplied with."""
        return [key.removesuffix(cls.end) + end for end in cls.needed()[1:]]

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
    refused = (".pre_quant_scale",)  # of AWQ: x is multiplied with it

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
    refused = (".weight_zero_point", ".weight_g_idx")

    @staticmethod
    def _factor(whole: Tensor) -> Tensor:
        return 1.0 / whole

    @staticmethod
    def _whole_shape() -> tuple[int, ...]:
        return (1,)


class Stacks:
    """How files of others have a stack of experts: as linear layers, one by one, each in a layout of its own.

    A global scale is of one of these layers, which are rows of an expert. The second level repeats it for 256 blocks
    each, so where an expert is of several layers (gate and up), these have whole multiples of 256 blocks.

    Args:
        one: the layout of each.
        stems: of each expert, of each layer that its rows are made of, in their order, the name in the files.
        kept: entries that are of no use here, and global scales: name in the files -> tensor.
    """

    def __init__(self, one: type[Layout], stems: list[tuple[str, ...]], kept: dict[str, Tensor] | None = None):
        self.one, self.stems, self.kept = one, stems, kept or {}
        self.kind = one.kind.stack

    def names(self, key: str) -> list[str]:
        """As of `Layout`."""
        return [name for each in self._keys() for name in self.one.names(each)]

    def scale_names(self, key: str) -> list[str]:
        """As of `Layout`."""
        return [name for each in self._keys() for name in self.one.scale_names(each)]

    def _keys(self) -> list[str]:
        return [f"{stem}{self.one.end}" for stems in self.stems for stem in stems]

    def read(self, key: str, get: Callable[[str], Tensor | None], dtype: torch.dtype, make: Any) -> tuple:
        """As of `Layout`; packed codes, scales and global scales are those of the files, nothing is rounded."""
        codes, scales, second, shapes = [], [], [], []
        for stems in self.stems:
            parts = [self.one.read(f"{stem}{self.one.end}", get, dtype, make) for stem in stems]
            self._check(key, stems, [state.shape for _, state, _ in parts], shapes)
            for packed, state, _ in parts:
                codes.append(packed.view(-1))
                scales.append(state.absmax)
                second += [state.state2.absmax] if self.kind.has_global else []
        shape = torch.Size((len(self.stems), sum(rows for rows, _ in shapes), shapes[0][1]))
        whole = torch.cat(second) if second else None
        state = self.kind.state(make, torch.cat(scales), whole, shape, dtype)
        return torch.cat(codes).view(-1, 1), state, self.of(key, get)

    def _check(self, key: str, stems: tuple[str, ...], found: list[torch.Size], first: list[torch.Size]) -> None:
        """ValueError unless layers of these shapes are one expert, as all are; `first`: the shapes of the first."""
        first[:] = first or found
        if found != first or len(set(found)) != 1:
            raise ValueError(
                f"{key}: {list(stems)} are {[list(each) for each in found]}, expected all {list(first[0])}"
            )
        blocks = [shape.numel() // self.kind.blocksize for shape in found]
        if self.kind.has_global and len(blocks) > 1 and blocks[0] % NESTED_BLOCKSIZE:
            raise ValueError(
                f"{key}: {list(stems)} have {blocks} blocks of {self.kind.blocksize} and a global scale each, which is "
                f"kept for each {NESTED_BLOCKSIZE} blocks of an expert: expected multiples of {NESTED_BLOCKSIZE}"
            )

    def of(self, key: str, get: Callable[[str], Tensor | None]) -> Stacks:
        """As of `Layout`."""
        kept = {}
        for each in self._keys():
            stem = each.removesuffix(self.one.end)
            kept |= {f"{stem}{end}": value for end, value in self.one.of(each, get).kept.items()}
        return Stacks(self.one, self.stems, kept)

    def written(self, key: str, packed: Tensor, state: Any) -> dict[str, Tensor]:
        """As of `Layout`."""
        experts, rows, columns = state.shape
        parts = len(self.stems[0])
        codes = packed.reshape(-1).view(torch.uint8)[: state.shape.numel() // 2].view(experts, parts, -1)
        scales, second = state.absmax.view(experts, parts, -1), state.state2.absmax.view(experts, -1)
        made: dict[str, Tensor] = {}
        for number, stems in enumerate(self.stems):
            for part, stem in enumerate(stems):
                own = state.clone()
                own.shape, own.absmax = torch.Size((rows // parts, columns)), scales[number, part]
                own.state2.absmax = second[number, part * second.shape[1] // parts :]
                kept = {end: self.kept[f"{stem}{end}"] for end in self.one.ends() if f"{stem}{end}" in self.kept}
                made |= self.one(kept).written(f"{stem}{self.one.end}", codes[number, part], own)
        return made


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
