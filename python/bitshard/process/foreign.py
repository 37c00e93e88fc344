"""Functions of other libraries that are known by name: what each asks of a packed weight, and what it gets.

Nobody is patched. These libraries ask a weight something (whether it is of a float dtype, how large it is), and the
right answer, or what must happen first, depends on who asks. Where a library renames its function nothing is done for
it any more: `tests/upstream/test_foreign.py` looks into the installed libraries and fails then, before a user sees it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple


class Foreign(NamedTuple):
    """A function of another library.

    Attributes:
        module, function: where it is defined, and its qualified name there.
        asks: what stands in its source where it asks.
        why: what it gets for an answer, and why.
    """

    module: str
    function: str
    asks: str
    why: str


FSDP2_PREPARES = Foreign(
    "accelerate.utils.fsdp_utils",
    "fsdp2_prepare_model",
    "is_floating_point()",
    "upcasts the trainable parameters of other models before FSDP2 takes them: here they get one dtype at this moment",
)
FSDP1_WRAPS = Foreign(
    "torch.distributed.fsdp.wrap",
    "_recursive_wrap",
    "numel()",
    "before it wraps a part of a model, whose trainable parameters get one dtype, which FSDP1 of torch 2.10 needs",
)
FSDP1_FLATTENS = Foreign(
    "torch.distributed.fsdp._flat_param",
    "FlatParamHandle._validate_tensors_to_flatten",
    "is_floating_point()",
    "refuses bytes in an integer container in words of its own: the error here names the setting to change",
)
DDP_SENDS = Foreign(
    "torch.distributed.utils",
    "_sync_module_states",
    "detach()",
    "sends packed bytes of rank 0 without their scales: ranks compare their weights first",
)
TRANSFORMERS_RESERVES = Foreign(
    "transformers.modeling_utils",
    "get_total_byte_count",
    "numel()",
    "allocates the sum of all sizes at once before it loads, to warm the allocator up, and counts whole weights also "
    "where a rank keeps a part (5.17 counts DTensors whole, too): more than a small GPU has",
)
TRANSFORMERS_SAVES = Foreign(
    "transformers.modeling_utils",
    "PreTrainedModel.save_pretrained",
    "state_dict()",
    "writes files that nobody could read where weights are parametrized: that raises",
)
TRANSFORMERS_WRITES = Foreign(
    "transformers.modeling_utils",
    "PreTrainedModel.save_pretrained",
    "hf_quantizer.get_state_dict_and_metadata(self)",
    "writes weights, configs and no other file: of a model whose files had one more that servers read, that one is "
    "written into its `save_directory`",
)
PEFT_MERGES = Foreign(
    "peft.tuners.lora.bnb", "Linear4bit.merge", "active_adapter", "gives a layer new bytes: those from before are kept"
)
PEFT_UNMERGES = Foreign(
    "peft.tuners.lora.bnb",
    "Linear4bit.unmerge",
    "merged_adapters",
    "gives a layer new bytes: it gets those from before",
)
TORCH_EXPORTS = Foreign(
    "torch.export._trace",
    "_export_for_training",
    "original_state_dict = _get_original_state_dict(mod)",
    "traces a module with tensors without attributes in the places of its parameters: the scales of a weight are those "
    "of the parameter that it has kept",
)
PEFT_LOOKS = Foreign(
    "peft.tuners.tuners_utils",
    "BaseTunerLayer.get_base_layer",
    'hasattr(base_layer, "base_layer")',
    "the first that `merge` and `unmerge` ask of a layer: what they cannot do raises now, and an adapter that "
    "`unmerge` has taken off its list stays on it until the weight has been put back",
)
PEFT_MERGES_STACKS = Foreign(
    "peft.tuners.lora.layer",
    "ParamWrapper.merge",
    "param.data.clone()",
    "with safe_merge adds to a copy of the values: of packed bytes a stand-in takes what is added",
)
TORCH_TRAINS = Foreign(
    "torch.nn.modules.module",
    "Module.train",
    "module.train(mode)",
    "tells each part of a model that training begins: the outermost one that runs is of the model itself",
)
TORCH_DESTROYS = Foreign(
    "torch.distributed.distributed_c10d",
    "destroy_process_group",
    "_update_default_pg(None)",
    "waits for all that NCCL has of a group, also what is inside of CUDA graphs: these are dropped first",
)
TORCH_REPLICATES = Foreign(
    "torch.nn.parallel.parallel_apply",
    "parallel_apply",
    "def _worker(",
    "calls DataParallel's copies of a module, each in a thread: they share what stands in front of the module's call",
)
TORCH_OFFLOADS = Foreign(
    "torch.autograd.graph",
    "save_on_cpu.__init__",
    "def pack_to_cpu(",
    "brings what autograd keeps to the host: a graph brings the inputs of checkpointed layers there itself",
)
TRL_OFFLOADS = Foreign(
    "trl.models.activation_offloading",
    "OffloadActivations.__init__",
    "def pack_tensor(",
    "the same, for trl's `activation_offloading`",
)
TRAINER_STEPS = Foreign(
    "transformers.trainer",
    "Trainer.training_step",
    "self.compute_loss(",
    "is followed by a wait for its loss, so that one that is not finite stays out of the log: a step of graphs is over "
    "on the GPU before the host goes on, unless its trainer's arguments say not to look",
)
KNOWN = (FSDP2_PREPARES, FSDP1_WRAPS, FSDP1_FLATTENS, DDP_SENDS, TRANSFORMERS_RESERVES, TRANSFORMERS_SAVES)
KNOWN += (TRANSFORMERS_WRITES, PEFT_MERGES, PEFT_UNMERGES, PEFT_LOOKS, PEFT_MERGES_STACKS, TORCH_EXPORTS, TORCH_TRAINS)
KNOWN += (TORCH_DESTROYS, TORCH_REPLICATES, TORCH_OFFLOADS, TRL_OFFLOADS, TRAINER_STEPS)


# Methods of modules and trainers in which a forward runs: torch's, transformers' and Lightning's
_RUNNING = frozenset("_call_impl forward generate training_step validation_step test_step predict_step".split())


def running_methods() -> Iterator[Any]:
    """`self` of every method on the call stack in which a forward runs, innermost first.

    Up to Python 3.12 a look into a frame's variables keeps them all alive until its function returns. These functions
    end with the forward; that which has made the model, and may drop it, is not looked into.
    """
    for frame in _outwards(sys._getframe(1)):
        if frame.f_code.co_name in _RUNNING:
            yield frame.f_locals.get("self")


def asker() -> FrameType | None:
    """The frame of the foreign code whose question about a weight is being answered."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("bitshard."):
        frame = frame.f_back
    return frame


def is_of(frame: FrameType, known: Foreign) -> bool:
    """Whether a frame is of a known function, by its name: copies in other libraries count."""
    return frame.f_code.co_name == known.function.rpartition(".")[2]


def asked_by(known: Foreign) -> FrameType | None:
    """The frame of a known function where that is who asks, perhaps in a generator; else None."""
    frame = asker()
    if frame is not None and frame.f_code.co_name == "<genexpr>":
        frame = frame.f_back
    return frame if frame is not None and is_of(frame, known) else None


def running(known: Foreign) -> FrameType | None:
    """The innermost frame of a known function that is running in this thread; None where there is none."""
    return next((frame for frame in _outwards(sys._getframe(1)) if is_of(frame, known)), None)


def outermost(known: Foreign, code: CodeType) -> FrameType | None:
    """The outermost running call of a known function whose calls call each other; None without one.

    `code` is that of the function itself. Others of its name may be between them (those of subclasses and wrappers); a
    function of another name ends the search.
    """
    name, found = known.function.rpartition(".")[2], None
    for frame in _outwards(sys._getframe(2)):  # from what calls the function that asks
        if frame.f_code is code:
            found = frame
        elif frame.f_code.co_name != name:
            break
    return found


def made_in(function: Any, known: Foreign) -> bool:
    """Whether `function` is defined inside of a known one."""
    name = getattr(function, "__qualname__", "")
    return getattr(function, "__module__", None) == known.module and name.startswith(f"{known.function}.<locals>.")


def runs_in_a_thread(known: Foreign) -> bool:
    """Whether any thread is in a known function of that module."""
    file = known.module.replace(".", "/") + ".py"
    return any(
        is_of(frame, known) and frame.f_code.co_filename.endswith(file)
        for innermost in sys._current_frames().values()
        for frame in _outwards(innermost)
    )


def threaded_module(known: Foreign) -> Any:
    """The module that this thread was started to call, by a known function that starts one for each; else None."""
    if threading.current_thread() is threading.main_thread():
        return None
    file = known.module.replace(".", "/") + ".py"
    for frame in _outwards(sys._getframe(1)):
        if frame.f_code.co_name == "_worker" and frame.f_code.co_filename.endswith(file):
            return frame.f_locals.get("module")
    return None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """`frame` and those that it was called from."""
    while frame is not None:
        yield frame
        frame = frame.f_back
