"""Adapters merged into a 4-bit base, with codes and scales that are calibrated to what the adapters trained."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitshard.calibration.folder import Calibrated, calibrate_folder
from bitshard.convert.folder import format_of, json_object, quantization_of
from bitshard.convert.merge import merge_folder
from bitshard.convert.output import require_new
from bitshard.formats.kinds import KINDS

_FORMATS = {name for kind in KINDS.values() if kind.bits == 4 for name in kind.quant_types}
DENSE = ".dense"  # of the folder beside `out`, of merged weights in 16 bits


def merge_calibrated(
    base: str | os.PathLike,
    adapter: str | os.PathLike,
    out: str | os.PathLike,
    ids: Tensor,
    *,
    quant_type: str | None = None,
    device: str | torch.device = "cpu",
    max_shard_size: int | str = "5GB",
    **options: Any,
) -> tuple[int, Calibrated]:
    """Write the model of `base`, 4-bit, with the adapters of `adapter` in its weights to `out`: 4-bit ones as those of
    the base, calibrated to the merged weights.

    Not for adapters that were trained merge-aware: they are good when rounded to the nearest codes, not as they are.
    The merged weights are in OUT.dense meanwhile, in the dtype of the base's config, and are deleted at the end.

    Args:
        base, adapter, out, quant_type, max_shard_size: as of `convert.merge.merge_folder` with dtype=None.
        ids: int64 [S, L], samples of what the model is for: of the text that the adapters were trained on, best.
        device: that merges and calibrates.
        options: more keywords of `calibrate_folder`: tune_steps, seed, and bars.

    Returns how many modules have got an adapter, and what became of the weights. Errors are those of `merge_folder` and
    `calibrate_folder`; ValueError for a base that is not in NF4, FP4, MXFP4 or NVFP4 as bitshard writes them, so also
    for one in a layout of others; OSError where OUT.dense exists.
    """
    base, out = Path(base), Path(out)
    config = quantization_of(base)
    found = config.get("bnb_4bit_quant_type")
    if not format_of(base) or found not in _FORMATS:
        raise ValueError(
            f"{base}: its weights are {found or format_of(base) or 'not quantized'}, and merged ones are calibrated in "
            "NF4, FP4, MXFP4 or NVFP4, in bitshard's own files: merge into bfloat16, then bitshard quantize --calibrate"
        )
    if quant_type not in (None, found):
        raise ValueError(f"{base}: its weights are {found}, and stay {found} when they are merged in 4 bits")
    dense = out.with_name(out.name + DENSE)
    require_new(out)
    require_new(dense)
    shared: dict[str, Any] = {"device": device, "max_shard_size": max_shard_size}
    bars = {name: options[name] for name in ("progress", "check_progress") if name in options}
    try:
        count = merge_folder(base, adapter, dense, _dtype(base), **shared, **bars)
        report = calibrate_folder(dense, out, _config(config), ids, **shared, **options)
    finally:
        shutil.rmtree(dense, ignore_errors=True)
    return count, report


def _dtype(base: Path) -> torch.dtype:
    config = json_object(base / "config.json")
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), None)
    return found if found in (torch.float16, torch.bfloat16, torch.float32) else torch.bfloat16


def _config(found: dict[str, Any]) -> Any:
    from transformers.quantizers.auto import AutoQuantizationConfig

    return AutoQuantizationConfig.from_dict(found)
