"""Helpers around state dicts and models."""

import logging
import shlex
import subprocess
from collections.abc import Callable, Sequence

import torch
from bitshard.functional import pack_dict_to_tensor, unpack_tensor_to_dict
from bitshard.nn.linear8bit import FORMATS
from bitshard.outliers import OutlierTracer, find_outlier_dims, outlier_hook

__all__ = [
    "INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING",
    "LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING",
    "OutlierTracer",
    "execute_and_return",
    "find_outlier_dims",
    "logger",
    "outlier_hook",
    "pack_dict_to_tensor",
    "replace_linear",
    "sync_gpu",
    "unpack_tensor_to_dict",
]

logger = logging.getLogger(__name__)
INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING = dict(FORMATS)
LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING = {
    name: number for number, name in INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING.items()
}


def execute_and_return(command_string: str) -> tuple[str, str]:
    """Run a command without a shell; what it printed to stdout and to stderr, stripped."""
    done = subprocess.run(shlex.split(command_string), capture_output=True, text=True, encoding="utf-8")
    return done.stdout.strip(), done.stderr.strip()


def replace_linear(
    model: torch.nn.Module,
    linear_replacement: Callable[[int, int, bool], torch.nn.Module],
    skip_modules: Sequence[str] = ("lm_head",),
    copy_weights: bool = False,
    post_processing_function: str | None = None,
) -> torch.nn.Module:
    """Put `linear_replacement(in_features, out_features, has_bias)` in place of every `nn.Linear` below `model`.

    `skip_modules` are names of children, not paths. With `copy_weights` the new module takes over weight and bias;
    `post_processing_function` names a method of the old module to call, where it has one. Returns `model`.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, torch.nn.Linear) or name in skip_modules:
                continue
            new = linear_replacement(child.in_features, child.out_features, child.bias is not None)
            if copy_weights:
                new.weight, new.bias = child.weight, child.bias
            setattr(parent, name, new)
            if post_processing_function is not None and hasattr(child, post_processing_function):
                getattr(child, post_processing_function)(child)
    return model


def sync_gpu(t: torch.Tensor) -> None:
    """Wait for the work queued on the device of `t`."""
    if t.device.type == "cuda":
        torch.cuda.synchronize(t.device)
