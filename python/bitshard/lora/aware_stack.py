"""peft's adapters on a 4-bit stack of experts that multiply with what merging will give, as `bitshard.lora.aware` does.

The forward of the experts module, which runs inside, finds the adapters in the context of the call
(`bitshard.experts.adapted.of_call`), and merges them into each expert (`bitshard.experts.lora.merged_product`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitshard.experts.adapted import LowRank, Merged, begin_call, end_call
from bitshard.formats.state import QuantState
from bitshard.functions.merge import Adapter
from bitshard.lora.aware import adapters_of, gathered, merge_into, merged_whole
from bitshard.lora.stack import Peft, added_by


class MergeAwareParamWrapper(Peft):
    """peft's `lora.ParamWrapper`, whose forward and `merge` take the merged bytes."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged:
            return Peft.forward(self, x, *args, **kwargs)
        if "adapter_names" in kwargs or torch.compiler.is_dynamo_compiling():
            raise ValueError("a merge-aware stack of experts is not compiled, and takes no adapter_names")
        adapters, held = adapters_of(self), self.get_base_layer().packed_stacks[self.parameter_name]
        if not adapters:
            return self.base_layer(x, *args, **kwargs)
        begun = begin_call(held, Merged(tuple(self._added(held, *each) for each in adapters)))
        try:
            return self.base_layer(x, *args, **kwargs)
        finally:
            end_call(begun)

    @staticmethod
    def _added(held: Any, A: Tensor, B: Tensor, scale: float) -> LowRank:
        return added_by(held, A, B, A.shape[0] // held.shape[0], scale)

    def merged_4bit(self, packed: Tensor, state: QuantState, names: list[str]) -> tuple[Tensor, QuantState]:
        """(packed codes, state) of the whole stack with these adapters in it, in the order of their names."""
        held = self.get_base_layer().packed_stacks[self.parameter_name]
        found: list[Adapter] = []
        for A, B, s in adapters_of(self, names):
            added = self._added(held, gathered(A), gathered(B), s)
            found.append((*added.factors(held.transposed), s))
        return merged_whole(packed, state, found)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As peft's, with the bytes of the forward; all adapters at once."""
        merge_into(self, self.parameter_name, safe_merge, adapter_names)


MergeAwareParamWrapper.__name__ = MergeAwareParamWrapper.__qualname__ = "ParamWrapper"  # as peft prints its layers
ParamWrapper = MergeAwareParamWrapper  # pickles name it so
