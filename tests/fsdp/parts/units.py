"""Models loaded by `bitshard.fsdp.load` and `load_on_rank0`: exact, adapted, faulty, and how much a rank holds.

    torchrun --nproc-per-node 2 tests/fsdp/parts/units.py --dir DIR --out DIR/units

DIR is that of alone.py.
"""

import functools
from pathlib import Path

import faults
import torch
import torch.distributed as dist
from bitshard import fsdp
from helpers import tiny
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import fsdp_auto_wrap_policy
from shared import (
    DTYPES,
    EVERY,
    HALF,
    LAYERS,
    differing,
    linears,
    load,
    logits,
    name_of,
    quantization,
    rank,
    refused,
    run,
    same_bytes,
    start,
    world,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import _init_utils as fsdp1
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
HALF_LAYERS = lambda model: [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]  # noqa: E731


def by_units(folder, storage="uint8", nested=True, dtype="fp32", packed=False, how=fsdp.load, **options):
    """The model of a cell, as shared.load makes it."""
    if packed:
        return how(f"{folder}/{name_of(storage, nested, dtype)}", dtype=DTYPES[dtype], progress=False, **options)
    settings = {"dtype": DTYPES[dtype], "quantization_config": quantization(storage, nested)}
    return how(f"{folder}/dense", progress=False, **settings, **options)


def wrap(model, policy=None):
    """Under FSDP1, whose rank 0 sends the weights."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy or ModuleWrapPolicy({LlamaDecoderLayer}),
        sync_module_states=True,
        param_init_fn=fsdp.materialize,
        device_id=torch.device("cpu"),
    )


def check_model(cell, packed, folder):
    """FSDP2: an Nth on each rank, scales too, and the logits and state dict of the model that was loaded whole."""
    model = by_units(folder, *cell, packed=packed)
    share = fsdp.measure(model)
    assert share.fsdp == "FSDP2" and share.weights == LAYERS, share
    assert all(layer.quant_state.absmax.is_meta for layer in linears(model).values()), "scales whole before a forward"
    compare(model, folder, cell)


def check_rank0(cell, packed, folder):
    """FSDP1: the same, of what rank 0 alone has read."""
    model = by_units(folder, *cell, packed=packed, how=fsdp.load_on_rank0).requires_grad_(False)
    assert {p.device.type for p in model.parameters()} == {"meta" if rank() else "cpu"}
    model = wrap(model)
    assert fsdp.measure(model).fsdp == "FSDP1"
    compare(model, folder, cell)


def compare(model, folder, cell):
    expected = torch.load(f"{folder}/{name_of(*cell)}.pt")
    assert same_bytes(logits(model), expected["logits"])
    full = fsdp.full_state_dict(model)
    assert rank() or not differing(full, expected["state_dict"]), differing(full, expected["state_dict"])


def check_adapters(dora, folder):
    """Of one seed they are those that peft makes for a whole model, also DoRA's magnitudes; the rest is frozen."""
    torch.manual_seed(3)
    whole = get_peft_model(load(folder, device_map="cpu"), LoraConfig(use_dora=dora, **LORA))
    torch.manual_seed(3)
    model = by_units(folder, adapters=LoraConfig(use_dora=dora, **LORA))
    expected = {n.removeprefix("base_model.model."): p for n, p in whole.named_parameters() if p.requires_grad}
    found = {name: p.full_tensor() for name, p in model.named_parameters() if p.requires_grad}
    assert len(found) == (3 if dora else 2) * LAYERS
    assert not differing(found, expected)
    assert same_bytes(logits(model), logits(whole))
    # of peft's layers: model.active_adapters() asks transformers, which can refuse the newest peft that is published
    assert {tuple(part.active_adapters) for part in model.modules() if isinstance(part, BaseTunerLayer)} == {
        ("default",)
    }


def check_adapters_of_rank0(dora, folder):
    """FSDP1: peft adds them on all ranks, where the weights are and where they are not; rank 0's count."""
    torch.manual_seed(3)
    whole = get_peft_model(load(folder, device_map="cpu"), LoraConfig(use_dora=dora, **LORA))
    torch.manual_seed(3 + rank())
    model = get_peft_model(by_units(folder, how=fsdp.load_on_rank0), LoraConfig(use_dora=dora, **LORA))
    model = wrap(model, fsdp_auto_wrap_policy(model))
    assert same_bytes(logits(model), logits(whole))


def check_own_units(folder):
    """A function for adapters, called once with each outermost unit; attention and MLP are units of FSDP2."""
    seen = []
    model = by_units(folder, units=HALF_LAYERS, adapters=lambda unit: seen.append(type(unit).__name__))
    assert seen == ["LlamaAttention", "LlamaMLP"] * 2, seen
    assert not any(p.requires_grad for p in model.parameters())
    assert all(hasattr(part, "unshard") for part in HALF_LAYERS(model))
    assert not hasattr(model.model.layers[0], "unshard")
    compare(model, folder, ("uint8", True, "fp32"))


def check_dense_and_tied(folder):
    """Without 4-bit weights, and with a head that is the embeddings, which no file has twice; from a config, too."""
    target = f"{folder}/tied{world()}"
    if rank() == 0:
        tiny.llama(target, hidden_size=32, intermediate_size=64, num_hidden_layers=1, tie_word_embeddings=True)
    dist.barrier()
    whole = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model = fsdp.load(whole.config, [f"{target}/model.safetensors"], dtype=torch.float32, progress=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(p.requires_grad for p in model.parameters())
    assert same_bytes(logits(model), logits(whole))
    model = fsdp.load_on_rank0(target, dtype=torch.float32, progress=False)
    assert same_bytes(logits(wrap(model)), logits(whole))


def check_saved(how, folder):
    """What `save_pretrained` writes of it, before a forward and behind one, is what one process saves."""
    cell = ("uint8", True, "fp32")
    model = by_units(folder, *cell, how=how).requires_grad_(False)
    model = wrap(model) if how is fsdp.load_on_rank0 else model
    for moment in ("before", "behind"):
        target = Path(folder, f"saved-{how.__name__}-{moment}")
        fsdp.save_pretrained(model, target, progress=False)
        expected = {path.name: path.read_bytes() for path in Path(folder, name_of(*cell)).iterdir()}
        assert rank() or {path.name: path.read_bytes() for path in target.iterdir()} == expected, moment
        logits(model)


# ---- memory ----


class Held(TorchDispatchMode):
    """Bytes of the tensors that ops have made: those that live, and the most that did at once."""

    def __init__(self):
        super().__init__()
        self.seen, self.most, self.bound = {}, 0, 0

    @property
    def alive(self):
        self.seen = {key: (ref, size) for key, (ref, size) in self.seen.items() if not ref.expired()}
        return sum(size for _, size in self.seen.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self.bound += storage.nbytes()
        if self.bound > self.most:  # else what lives cannot be more than it once was
            self.bound = self.alive
            self.most = max(self.most, self.bound)
        return out


def check_memory(folder):
    """What a rank has made at once while loading is its shard and less than one dense layer, of ten times its size."""
    target, layers = f"{folder}/deep{world()}", 12
    if rank() == 0:
        sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "head_dim": 8}
        tiny.llama(target, num_hidden_layers=layers, **sizes)
    dist.barrier()
    layer = sum(p.numel() * 4 for p in AutoModelForCausalLM.from_pretrained(target).model.layers[0].parameters())
    settings = {"dtype": torch.float32, "quantization_config": quantization()}
    ways = {
        "units": lambda: fsdp.load(target, progress=False, **settings),
        "rank0": lambda: fsdp.load_on_rank0(target, progress=False, **settings),
        "whole": lambda: AutoModelForCausalLM.from_pretrained(target, device_map="cpu", **settings),
    }
    most, kept = {}, {}
    for name, way in ways.items():
        with Held() as held:
            model = way()
            most[name], kept[name] = held.most, held.alive
        assert name != "units" or kept[name] < fsdp.measure(model).packed  # embeddings and tables included
        del model
    assert most["units"] - kept["units"] < layer, (most, kept, layer)
    assert most["whole"] - kept["units"] > layer, (most, kept, layer)  # the bound can be missed
    assert rank() == 0 or most["rank0"] < layer, (most, layer)  # scales, and entries on their way
    return {"most": most, "kept": kept, "layer": layer}


# ---- faults ----


def check_fault(name, how, folder):
    """All ranks end with an error that names the fault; with `load_on_rank0`, whose rank 0 alone has seen it, too."""
    return faults.must_fail(
        name, lambda options: how(faults.folder_of(folder, name), dtype=torch.float32, progress=False, **options)
    )


def computing_in(which):
    """A config that computes in one of two dtypes."""
    config = quantization()
    config.bnb_4bit_compute_dtype = (torch.float32, torch.bfloat16)[which]
    return config


def check_lone_faults(folder):
    """One rank has other files, none, or an adapter that fails: all say so, and the next model loads."""
    mine = f"{folder}/dense" if rank() == 0 else f"{folder}/other-dense"
    settings = {"dtype": torch.float32, "quantization_config": quantization(), "progress": False}
    refused(lambda: fsdp.load(f"{folder}/dense", mine, **settings), "layers.1", "the same files")
    absent = f"{folder}/dense" if rank() == 0 else f"{folder}/nowhere"
    refused(lambda: fsdp.load(f"{folder}/dense", absent, **settings), "rank 1 of", "nowhere")

    def fail(unit):
        assert rank() == 0 or not isinstance(unit, LlamaDecoderLayer), "no adapter for this"

    refused(
        lambda: fsdp.load(f"{folder}/dense", adapters=fail, **settings), "layers.0", "rank 1", "no adapter for this"
    )
    refused(lambda: by_units(folder, packed=True, quantization_config=quantization()), "quantized already")
    for words, asked in (
        ("adapters.r': ['4', '8']", {"adapters": LoraConfig(**{**LORA, "r": 4 * (1 + rank())})}),
        ("adapters.lora_alpha", {"adapters": LoraConfig(**{**LORA, "lora_alpha": 8 + rank()})}),
        (
            "adapters.target_modules",
            {"adapters": LoraConfig(**LORA) if rank() else LoraConfig(target_modules=["q_proj"])},
        ),
        ("load: adapters", {"adapters": LoraConfig(**LORA) if rank() else fail}),
        ("quantization_config.bnb_4bit_compute_dtype", {"quantization_config": computing_in(rank())}),
    ):
        refused(lambda asked=asked: fsdp.load(f"{folder}/dense", **{**settings, **asked}), "bring different", words)
    check_model(("uint8", True, "fp32"), False, folder)


def check_missing(folder):
    """Tensors that files lack are counted and named before anything is read."""
    config = LlamaConfig.from_pretrained(f"{folder}/dense", num_hidden_layers=3)
    how = functools.partial(fsdp.load, config, f"{folder}/dense", progress=False)
    refused(how, "13 of 42 tensors", "model.layers.2.self_attn.q_proj.weight is missing", "more")
    assert not (set(faults.FAULTS) - {name.removeprefix("fault_") for name in CHECKS})


CHECKS = {
    "memory": check_memory,
    **{
        f"{kind}_{name_of(*cell)}_{'packed' if packed else 'dense'}": functools.partial(check, cell, packed)
        for kind, check, cells in (("model", check_model, EVERY), ("rank0", check_rank0, HALF))
        for cell, packed in cells
    },
    **{f"adapters_{name}": functools.partial(check_adapters, name == "dora") for name in ("lora", "dora")},
    **{f"rank0_{name}": functools.partial(check_adapters_of_rank0, name == "dora") for name in ("lora", "dora")},
    "own_units": check_own_units,
    "dense_and_tied": check_dense_and_tied,
    "saved": functools.partial(check_saved, fsdp.load),
    "saved_rank0": functools.partial(check_saved, fsdp.load_on_rank0),
    "missing": check_missing,
    **{f"fault_{name}": functools.partial(check_fault, name, fsdp.load) for name in faults.FAULTS},
    "fault_rank0_bytes": functools.partial(check_fault, "bytes_missing", fsdp.load_on_rank0),
    "fault_rank0_rows": functools.partial(check_fault, "rows_missing", fsdp.load_on_rank0),
    "lone_faults": check_lone_faults,
}

if __name__ == "__main__":
    options = start()
    # torch keeps FSDP1's sending of weights for GPUs; between these processes gloo does it
    fsdp1._check_module_states_for_sync_module_states = lambda states: None
    run(CHECKS, options)
