"""Which columns of weights and inputs stand out: tools for looking at models, with bitsandbytes' names.

No product asks them: the outlier columns of LLM.int8 are found in each x by its threshold (`bitshard.int8`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.process.instance import OneInstance
from bitshard.process.recognized import OfBitsandbytes

logger = logging.getLogger(__name__)


class GlobalOutlierPooler(OneInstance):
    """Outlier columns of many layers of one width, in one set; made by `get_instance` only."""

    outliers: set[int]
    model_dim: int | None

    def initialize(self) -> None:
        """Forget all columns, and the width."""
        self.outliers = set()
        self.model_dim = None

    begin = initialize

    def add_outliers(self, outlier_idx: Tensor, feature_dim: int) -> None:
        """Add columns of a layer with `feature_dim` inputs; layers of another width than the first are passed over."""
        if self.model_dim is None:
            self.model_dim = feature_dim
        if self.model_dim == feature_dim:
            self.outliers.update(outlier_idx.tolist())

    def get_current_outlier_idx(self) -> Tensor:
        """int64 [n]: all columns."""
        return torch.tensor(list(self.outliers), dtype=torch.int64)


class OutlierTracer(OneInstance):
    """Outlier columns of the linear layers of one model, found in the first forward; made by `get_instance` only.

    A layer gets those that its own weight shows (`find_outlier_dims`), the first one those of its input, too.
    """

    def initialize(self, model: nn.Module) -> None:
        """Watch the next forward of `model`."""
        self.last_w = self.current_outlier_dims = None
        self.hvalues: list[int] = []
        self.outliers: list[Tensor] = []
        self.hvalue2outlier_idx: dict[int, Tensor] = {}
        self.hooks = [m.register_forward_pre_hook(outlier_hook) for m in model.modules() if isinstance(m, nn.Linear)]
        self.initialized = True

    def is_initialized(self) -> bool:
        """Whether a model is watched."""
        return getattr(self, "initialized", False)

    def get_hvalue(self, weight: Tensor) -> int:
        """What a weight is known by: the address of its storage."""
        return weight.data.untyped_storage().data_ptr()

    def get_outliers(self, weight: Tensor) -> Tensor | None:
        """The outlier columns of a layer's weight; None where it was not seen."""
        if not self.is_initialized():
            logger.warning("OutlierTracer: no model is watched, call initialize(model) first")
            return None
        return self.hvalue2outlier_idx.get(self.get_hvalue(weight))


def outlier_hook(module: nn.Module, input: Any) -> None:
    """Before the forward of a watched linear layer: note its outlier columns; a layer seen before ends the watch."""
    tracer = OutlierTracer.get_instance()
    key = tracer.get_hvalue(module.weight)
    if key in tracer.hvalue2outlier_idx:
        for hook in tracer.hooks:
            hook.remove()
        return
    found = find_outlier_dims(module.weight)
    tracer.outliers.append(found)
    tracer.hvalues.append(key)
    if len(tracer.outliers) == 1:  # no weight before it: also what stands out in x
        x = input[0].reshape(-1, input[0].shape[-1])
        large = (x.abs() > 6).any(0).nonzero().view(-1)
        found = torch.cat([find_outlier_dims(x, zscore=3), large]).unique()
    tracer.hvalue2outlier_idx[key] = found


def find_outlier_dims(
    weight: Tensor, reduction_dim: int = 0, zscore: float = 4.0, topk: int | None = None, rdm: bool = False
) -> Tensor:
    """Columns of `weight` [N, K] whose standard deviation is more than `zscore` deviations above that of all columns.

    With `topk` the so many largest; with `rdm` as many by chance.
    """
    if rdm:
        return torch.randint(0, weight.shape[1], size=(topk,), dtype=torch.int64, device=weight.device)
    deviation = weight.std(reduction_dim)
    if topk is not None:
        return deviation.abs().topk(topk, dim=0).indices
    return ((deviation - deviation.mean()) / deviation.std() > zscore).nonzero().view(-1)


class OutlierAwareLinear(nn.Linear, OfBitsandbytes):
    """A base class: a linear layer that quantizes its weight once, knowing its outlier columns.

    A subclass has `quantize_weight` and `forward_with_outliers`.
    """

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
    ):
        super().__init__(input_features, output_features, bias, device)
        self.outlier_dim: Tensor | None = None
        self.is_quantized = False

    def forward_with_outliers(self, x: Tensor, outlier_idx: Tensor | None) -> Tensor:
        """y of x [..., K], given the outlier columns: of a subclass."""
        raise NotImplementedError(f"{type(self).__name__} has no forward_with_outliers(x, outlier_idx)")

    def quantize_weight(self, w: Tensor, outlier_idx: Tensor | None) -> Tensor:
        """What takes the place of the weight w [N, K], given the outlier columns: of a subclass."""
        raise NotImplementedError(f"{type(self).__name__} has no quantize_weight(w, outlier_idx)")

    def forward(self, x: Tensor) -> None:
        """Quantize the weight in the first call. As in bitsandbytes, it returns nothing."""
        if self.outlier_dim is None:
            self.outlier_dim = OutlierTracer.get_instance().get_outliers(self.weight)
        if not self.is_quantized:
            self.weight.data.copy_(self.quantize_weight(self.weight, self.outlier_dim))
            self.is_quantized = True
