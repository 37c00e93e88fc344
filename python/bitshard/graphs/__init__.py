"""Training steps as CUDA graphs: a launch for a forward and one for its backward, instead of thousands.

    bitshard.graphs.enable(model)           # any loop, any trainer: model(**batch), loss.backward(), optimizer.step()
    print(bitshard.graphs.report(model))

For the few thousand tokens of a training step the host needs longer to launch the work than the GPU needs to do it,
most of all under FSDP2. With `enable`, or BITSHARD_GRAPHS=1 and a script as it is, each call of the model in training
runs as one graph, FSDP2's gathers and reductions included, and its backward as another. What the call returns,
gradients, hooks on parameters, clipping, optimizers, schedules, and evaluation stay as they are
([speed.md](docs/speed.md) of the project: what falls back, and why). `CapturedStep` is the older form: forward and
backward as one graph, on one GPU.
"""

from __future__ import annotations

from torch import nn

from bitshard.graphs.captured_step import CapturedStep
from bitshard.graphs.enabled import Enabled, Report
from bitshard.process import switches

__all__ = ["CapturedStep", "Report", "disable", "enable", "report"]

_CALL = "_compiled_call_impl"  # what torch's modules ask for before they call themselves


def enable(model: nn.Module, pad_to_multiple_of: int | None = None) -> None:
    """Let each call of `model` in training, and its backward, run as CUDA graphs where they give the same.

    Args:
        model: the module that is called in a training step, the outermost one, before or after FSDP2 shards it or DDP
            wraps it. Enabling it again changes nothing. Copies and pickles of it are not enabled.
        pad_to_multiple_of: let rows of batches that have another length be this many tokens' next multiple inside the
            model, so that fewer graphs are made. For causal language models: results are those of the batch as it is.
            None: BITSHARD_PAD_TO_MULTIPLE_OF, if that is set, else as they are.

    Nothing is recorded now. A call of a new form (shapes of its arguments, other values, torch's settings) runs as it
    is, the next one of this form is recorded; a form that is shorter than others may be recorded at once. What can't be
    a graph runs as it is, too, with a line in the log that says why, once for each reason; `report` counts them. Where
    something of the model changes that a graph has inside, its graphs are dropped and made anew.

    TypeError where `model` is no module; ValueError where torch.compile compiles it already, and for a step below 1.
    """
    step = switches.padding() if pad_to_multiple_of is None else pad_to_multiple_of
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 1):
        raise ValueError(f"bitshard.graphs.enable: pad_to_multiple_of is {step!r}, expected an int from 1 on")
    module = _called(model, "enable")
    found = vars(module).get(_CALL)
    if isinstance(found, Enabled):
        return
    if found is not None:
        raise ValueError(
            f"bitshard.graphs.enable: torch.compile compiles the call of this {type(module).__name__}; use one of both"
        )
    module.__dict__[_CALL] = Enabled(module, step)


def disable(model: nn.Module) -> None:
    """Undo `enable` and free its graphs; nothing where it was not called."""
    module = _called(model, "disable")
    if isinstance(vars(module).get(_CALL), Enabled):
        module.__dict__.pop(_CALL).drop()


def report(model: nn.Module) -> Report:
    """How the calls of an enabled model ran so far. ValueError where it is not enabled."""
    module = _called(model, "report")
    found = vars(module).get(_CALL)
    if not isinstance(found, Enabled):
        raise ValueError(f"bitshard.graphs.report: enable was not called with this {type(module).__name__}")
    return found.report()


def _called(model: nn.Module, caller: str) -> nn.Module:
    """The module whose call is a step: the one inside DDP or torch.compile's wrapper."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"bitshard.graphs.{caller}: model is a {type(model).__name__}, expected a torch module")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return _called(model.module, caller)
    if hasattr(model, "_orig_mod"):
        raise ValueError(f"bitshard.graphs.{caller}: torch.compile wraps this model; use one of both")
    return model
