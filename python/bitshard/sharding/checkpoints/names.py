"""The names under which, and the pieces in which, files have the tensors of a model of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def conversions(model: nn.Module) -> list[Any]:
    """What transformers does to a checkpoint's tensors of this kind of model while it loads them, dense ones."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


def are_changed(model: nn.Module) -> bool:
    """Whether `reverted` has anything to do for this model; transformers reads all of its modules to say so."""
    from transformers.core_model_loading import revert_weight_conversion

    if not hasattr(model, "config"):
        return False
    known, tensors = getattr(model, "_weight_conversions", None), {}
    return bool(known) if known is not None else revert_weight_conversion(model, tensors) is not tensors


def reverted(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names, and in the pieces, in which transformers saves them; of other modules as they are.

    In a dict of their own: transformers gives back the one that it got where nothing is to be reversed.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors) if hasattr(model, "config") else tensors)
