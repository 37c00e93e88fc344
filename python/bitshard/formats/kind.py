"""What a kind of packed weight is: all that holder, shard, loading, saving and products ask of bytes with scales.

A weight is a column of bytes in a container dtype, its scales, and a `QuantState` that names its kind. How many there
are of each, which entries of a checkpoint they are, what must agree for one weight's bytes to take another's place, and
what is computed with them, is the kind's and nowhere above. A further kind is one more object that `register` is given;
`docs/contributing.md` says how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bitshard.formats import entries


class Kind:
    """One kind of packed weight.

    Attributes:
        word: for messages: a "4-bit" or an "int8" weight.
        name: of the layout of the bytes in checkpoints; None for bitsandbytes' own.
        bits: of a code.
        quant_types: the formats that it has, by the names that configurations and checkpoints give them.
        blocksize, blocksizes: elements per scale: where nothing else is said, and those that exist.
        format: names of a state's attributes that must be equal for its bytes and scales to be of one format.
        attributes: names of a weight's attributes that only weights of this kind have.
        own_keys: entries of a checkpoint that are tensors and that no other kind has.
        stacked: whether it is a stack of weights, one after the other, [E, N, K].
        stack: the kind of stacks of such weights; None where there is none.
        nests: whether its scales can be quantized, too (`functional.nest`).
        by_blocks: whether rows that are whole blocks get the bytes and scales that the whole weight gives them.
        fuses_lora: whether the C core multiplies x with it and with a LoRA adapter in one call.
        merge: (packed, state, adapters) -> (packed, state) with LoRA adapters in it, for `functions.merge.merge_4bit`;
            None where that does not merge.
        quantize: (values, with keywords the settings of `functional.quantize_4bit`) -> (packed, state).
        dequantize: (packed, state, out=None) -> values of state.shape and state.dtype, of a weight that is whole here.
        product: (x [..., K], packed, state, bias or None, offs, threshold) -> x W^T + bias [..., N]; no gradient
            (`bitshard.products` has it). offs: where the rows of each expert of a stack end, else None.
        gradient: (dy [..., N], packed, state, offs) -> dy W [..., K]; no gradient.
    """

    word: str
    name: str | None
    bits: int
    quant_types: tuple[str, ...]
    blocksize = 64
    blocksizes: tuple[int, ...] = entries.BLOCKSIZES
    format: tuple[str, ...] = ("shape", "blocksize", "quant_type", "nested", "kind")
    attributes: tuple[str, ...] = ()
    own_keys: tuple[str, ...] = ()
    stacked = False
    stack: Kind | None = None
    nests = False
    by_blocks = True
    fuses_lora = False
    merge: Callable[..., Any] | None = None
    quantize: Callable[..., Any]
    dequantize: Callable[..., Tensor]
    product: Callable[..., Tensor]
    gradient: Callable[..., Tensor]

    # -- sizes --

    def elements(self, state: Any, itemsize: int) -> int:
        """Elements of `itemsize` bytes that hold the packed bytes of a state's tensor."""
        return -(-state.shape.numel() * self.bits // (8 * itemsize))

    def scale_count(self, state: Any) -> int:
        """Scales of a state's tensor."""
        return -(-state.shape.numel() // state.blocksize)

    def parts(self, state: Any) -> int:
        """Into how many parts of equal size the tensor falls, each with a second level of scales of its own."""
        return state.shape[0] if self.stacked else 1

    # -- checks --

    def check(self, quant_type: str, blocksize: int) -> None:
        """ValueError unless the kind has this format, and blocks of this size."""
        if quant_type not in self.quant_types:
            raise ValueError(f"quant_type is {quant_type!r}, expected {' or '.join(map(repr, self.quant_types))}")
        if blocksize not in self.blocksizes:
            raise ValueError(f"invalid blocksize {blocksize}: expected one of {self.blocksizes}")

    def check_state(self, packed: Tensor, state: Any, where: str) -> None:
        """TypeError or ValueError unless bytes and state can be of this kind: what must hold before sizes count."""

    # -- gradient of a bias --

    def bias_gradient(self, dy: Tensor, state: Any, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Sums of the rows of dy [..., N], of a stack of each expert's: [N] or [E, N] of `dtype`."""
        return dy.reshape(dy.shape[:-1].numel(), dy.shape[-1]).sum(0, dtype=dtype)

    # -- in checkpoints --

    def stored_shape(self, state: Any, itemsize: int) -> tuple[int, ...]:
        """Shape of the packed bytes in a checkpoint file, in a storage dtype of `itemsize` bytes."""
        return self.elements(state, itemsize), 1

    def tensors(self, state: Any) -> dict[str, Tensor]:
        """The tensors of a state by the names that its entries have; of a state with all scales."""
        own = {"absmax": state.absmax, "quant_map": state.code}
        return own if state.global_scale is None else {**own, "global_scale": state.global_scale}

    def read(self, cls: Any, given: dict[str, Any]) -> Any:
        """The state, made by `cls`, that entries (`formats.entries.read_all`) say.

        TypeError or ValueError, with the numbers, for anything missing, contradictory or out of range.
        """
        raise NotImplementedError

    def beside(self, key: str, state: Any) -> dict[str, Tensor]:
        """The entries of a checkpoint file beside the weight `key`, by their whole keys; of a state with all scales."""
        return {f"{key}.{name}": value for name, value in state.as_dict(packed=True).items()}

    def names_beside(self, key: str, files: Any) -> list[str]:
        """Keys of what the weight `key` needs of files (`checkpoints.reading.Checkpoint`); none of a dense one."""
        return [f"{key}.{name}" for name in files.entries(key)]

    def empty_beside(self, key: str, state: Any, json_bytes: int) -> tuple[dict[str, Tensor], str | None]:
        """`beside` of a state on the meta device, and the key of the JSON entry, whose length is not known, if any."""
        made, late = self.tensors(state), f"{key}.quant_state.{entries.BLOB_PREFIX}{state.quant_type}"
        blob = torch.empty(json_bytes, dtype=torch.uint8, device="meta")
        return {**{f"{key}.{name}": value for name, value in made.items()}, late: blob}, late

    def unfiled(self, key: str, given: dict[str, Any], state: Any) -> dict[str, Any]:
        """Entries of a state dict with those of the weight `key` as `QuantState.as_dict` names them."""
        return given

    def filed(self, key: str, given: dict[str, Any], state: Any) -> dict[str, Any]:
        """The reverse: whole entries of a state dict with those of the weight `key` as a file has them."""
        return given

    def __reduce__(self) -> tuple:
        return kind_named, (self.name,)  # copies and pickles are the same object


KINDS: dict[str | None, Kind] = {}  # by their names in checkpoints


def register(*kinds: Kind) -> None:
    """Make kinds known, by their names in checkpoints."""
    KINDS.update({kind.name: kind for kind in kinds})


def kind_named(name: str | None) -> Kind:
    """The kind with this name in checkpoints."""
    return KINDS[name]


kind_named.__module__ = "bitshard.kinds"  # as pickles name it


def quant_types() -> Iterable[str]:
    """Names of the formats of all kinds."""
    return dict.fromkeys(quant_type for kind in KINDS.values() for quant_type in kind.quant_types)


def kind_of_entries(given: dict[str, Any]) -> Kind:
    """The kind of the weight with these entries: by its layout, if they name one, and by its format.

    ValueError where there is none, or where they contradict each other.
    """
    quant_type, name = given["quant_type"], given.get(entries.LAYOUT_KEY)
    found = [kind for kind in KINDS.values() if isinstance(quant_type, str) and quant_type in kind.quant_types]
    if not found:
        raise ValueError(
            f"quantization state: quant_type is {entries.short(quant_type)}, expected one of {sorted(quant_types())}"
        )
    for kind in found:
        if kind.name == name:
            return kind
    known = [kind.name for kind in found if kind.name]
    raise ValueError(f"quantization state: layout is {entries.short(name)}, known are {known}")


def kind_of(quant_type: Any) -> Kind:
    """The kind of one weight (not of a stack) in the format of this name. ValueError where there is none."""
    for kind in KINDS.values():
        if not kind.stacked and quant_type in kind.quant_types:
            return kind
    raise ValueError(f"quant_type is {quant_type!r}, expected one of {sorted(quant_types())}")
