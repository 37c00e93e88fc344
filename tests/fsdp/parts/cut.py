"""Weights of which a rank keeps only its part while they are loaded, until accelerate shards them.

    accelerate launch --config_file tests/fsdp/fsdp2_cut.yaml tests/fsdp/cpu_fsdp.py tests/fsdp/parts/cut.py \\
        --dir DIR --out DIR/cut

DIR is that of alone.py. The checks that load models come before the first that shards one, after which models are
loaded whole, unless BITSHARD_CUT=1.
"""

import functools
import gc
import os
import time

import faults
import torch
import torch.distributed as dist
from accelerate import Accelerator
from bitshard import fsdp
from bitshard.functional import dequantize_4bit
from peft import LoraConfig, get_peft_model
from shared import (
    EVERY,
    HALF,
    LAYERS,
    differing,
    environment,
    linears,
    load,
    load_from,
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CELL = ("uint8", True, "fp32")
PATIENCE = 2  # seconds that a rank waits for the others before it gathers a weight
REFUSAL = ("keeps only its part", "BITSHARD_CUT=0")


def model_of(folder, cell=CELL, packed=False, **options):
    return load(folder, *cell, packed=packed, device_map="cpu", **options)


def expected_of(folder, cell=CELL):
    return torch.load(f"{folder}/{name_of(*cell)}.pt")


def is_cut(model):
    """Whether no 4-bit weight has memory behind it; AssertionError where only some have not."""
    found = {layer.weight.untyped_storage().nbytes() == 0 for layer in linears(model).values()}
    assert len(found) == 1, found
    return found.pop()


def whole_of(folder, cell=CELL, packed=False):
    with environment(BITSHARD_CUT="0"):
        model = model_of(folder, cell, packed)
    assert not is_cut(model)
    return model


def prepare(accelerator, model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, _ = accelerator.prepare(model, optimizer)
    accelerator._models.clear()
    accelerator._optimizers.clear()
    return model


def live_bytes():
    """Of all storages that tensors of this process hold."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not issubclass(type(thing), dist.tensor.DTensor):
            with torch._C.DisableTorchFunctionSubclass():
                if thing.device.type == "cpu" and thing.layout is torch.strided:
                    storage = thing.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


# ---- before the first model is sharded ----


def check_memory(folder):
    """A rank keeps ceil(n / world) rows and scales of a weight, and nothing of the rest but small entries."""
    whole = whole_of(folder)
    packed = sum(layer.weight.nbytes for layer in linears(whole).values())
    scales = sum(layer.quant_state.absmax.nbytes for layer in linears(whole).values())
    others = sum(p.nbytes for name, p in whole.named_parameters() if name.removesuffix(".weight") not in linears(whole))
    model_of(folder)  # what the first of a process leaves behind is not a model's
    before = live_bytes()
    model = model_of(folder)
    assert is_cut(model)
    kept = live_bytes() - before - others
    for layer, full in zip(linears(model).values(), linears(whole).values(), strict=True):
        assert layer.weight.shape == full.weight.shape and layer.weight.dtype is full.weight.dtype
        assert layer.quant_state.sharded.own.numel() <= -(-full.quant_state.absmax.numel() // world())
    small = 1152 * LAYERS  # code tables, which a state may have for itself, the second level, checksums
    assert 0 <= kept - int((packed + scales) / world() * 0.99) < small, (kept, packed, scales, others)
    return {"kept": kept, "packed": packed, "scales": scales}


def check_reads_raise(folder):
    """On every rank and without a word to the others."""
    model = model_of(folder)
    layer = linears(model)["model.layers.0.mlp.up_proj"]
    x = torch.ones(1, layer.in_features)
    seen = [
        refused(lambda: logits(model), *REFUSAL, kinds=ValueError),
        refused(lambda: layer(x), *REFUSAL, kinds=ValueError),
        refused(layer.weight.clone, *REFUSAL, kinds=ValueError),
        refused(lambda: layer.weight + 1, *REFUSAL, kinds=ValueError),
        refused(layer.weight.tolist, *REFUSAL, kinds=ValueError),
    ]
    return seen


def check_state_dicts(folder):
    """An adapter loads beside weights that are not there, as `PeftModel.from_pretrained` does; the base does not."""
    model = get_peft_model(model_of(folder), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    state_dict = model.state_dict()
    adapter = {name: torch.ones_like(value) for name, value in state_dict.items() if "lora_" in name}
    missing, unexpected = model.load_state_dict(adapter, strict=False)
    assert not unexpected and all(bool((p == 1).all()) for name, p in model.named_parameters() if "lora_" in name)
    (name,) = (name for name in state_dict if name.endswith("layers.0.mlp.up_proj.base_layer.weight"))
    whole = whole_of(folder).state_dict()["model.layers.0.mlp.up_proj.weight"]
    refused(lambda: model.load_state_dict({name: whole}, strict=False), *REFUSAL, kinds=RuntimeError)
    refused(lambda: model.load_state_dict({}), name, kinds=RuntimeError)
    for read in (
        lambda: torch.save(state_dict, os.devnull),
        lambda: torch.cat([state_dict[name], state_dict[name]]),
        lambda: state_dict[name].half(),
        lambda: state_dict[name].to("meta"),
        lambda: state_dict[name].cpu().numpy(),
    ):
        refused(read, *REFUSAL, kinds=ValueError)
    assert repr(state_dict[name]).startswith("Params4bit(this rank's part of [")
    assert "loaded in parts, not sharded yet" in fsdp.describe(model)


def check_lone_reads_raise(folder):
    """Each rank alone: none of these waits."""
    model = model_of(folder)
    for reader in range(world()):
        began = time.monotonic()
        if rank() == reader:
            refused(lambda: logits(model), *REFUSAL, kinds=ValueError)
            refused(linears(model)["model.layers.1.mlp.down_proj"].weight.clone, *REFUSAL, kinds=ValueError)
            assert time.monotonic() - began < 2
        dist.barrier()


def check_dequantize(folder):
    """All ranks together get every number."""
    model, whole = model_of(folder), whole_of(folder)
    assert is_cut(model)
    for layer, full in zip(linears(model).values(), linears(whole).values(), strict=True):
        found = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        assert same_bytes(found, dequantize_4bit(full.weight.data, full.weight.quant_state))


def check_lone_dequantize(folder):
    """A rank that comes alone gives up in time, says what to set, and leaves the others and itself usable."""
    model = model_of(folder)
    layer = linears(model)["model.layers.0.self_attn.q_proj"]
    read = functools.partial(dequantize_4bit, layer.weight.data, layer.weight.quant_state)
    text = None
    began = time.monotonic()
    if rank() == 0:
        text = refused(read, "BITSHARD_CUT=0")
        assert PATIENCE - 0.5 <= time.monotonic() - began < PATIENCE + 4
    dist.barrier()
    full = linears(whole_of(folder))["model.layers.0.self_attn.q_proj"]
    assert same_bytes(read(), dequantize_4bit(full.weight.data, full.weight.quant_state))
    return text


def check_other_weights(folder):
    """Rank 0 and the others come with different weights of one shape at the same time: no mixture of the two."""
    layer = linears(model_of(folder))[f"model.layers.{min(rank(), 1)}.self_attn.q_proj"]
    dist.barrier()
    return refused(functools.partial(dequantize_4bit, layer.weight.data, layer.weight.quant_state), "BITSHARD_CUT=0")


def check_late_dequantize(folder):
    """A rank that comes a second later finds the others waiting."""
    layer = linears(model_of(folder))["model.layers.0.self_attn.q_proj"]
    time.sleep(rank() * 0.5)
    found = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    full = linears(whole_of(folder))["model.layers.0.self_attn.q_proj"]
    assert same_bytes(found, dequantize_4bit(full.weight.data, full.weight.quant_state))


def check_dora(folder):
    """peft's constructor dequantizes each weight for its magnitudes."""

    def magnitudes(model):
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=True)
        found = get_peft_model(model, config).named_parameters()
        return {name: p.detach() for name, p in found if "magnitude" in name}

    model = model_of(folder)
    assert is_cut(model)
    found, expected = magnitudes(model), magnitudes(whole_of(folder))
    assert len(found) == LAYERS and not differing(found, expected), differing(found, expected)


def check_switched_off(folder):
    """BITSHARD_CUT=0, and a process that accelerate tells to load as ever."""
    assert same_bytes(logits(whole_of(folder)), expected_of(folder)["logits"])
    with environment(ACCELERATE_USE_FSDP=None):
        assert not is_cut(model_of(folder))
    with environment(FSDP_VERSION="1"):
        assert not is_cut(model_of(folder))


def check_without_efficient_loading(folder):
    """FSDP_CPU_RAM_EFFICIENT_LOADING=false asks for whole weights."""
    with environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        assert not is_cut(model_of(folder))


def check_fault(name, folder):
    """All ranks have the faulty files: each ends with an error that names the fault, and none waits for another."""

    def attempt(options):
        return load_from(faults.folder_of(folder, name), device_map="cpu", **options)

    return faults.must_fail(name, attempt)


# ---- sharding ----


def check_equal(model, expected):
    share = fsdp.measure(model)
    assert share.fsdp == "FSDP2" and share.weights == LAYERS, share
    for layer in linears(model).values():
        assert layer.weight._local_tensor.size(0) <= -(-layer.weight.size(0) // world())
        assert layer.weight._local_tensor.untyped_storage().nbytes() > 0 or rank() > 0
    assert share.own_packed <= -(-share.packed // world()) + 4 * LAYERS, share
    assert share.own_scales <= share.scales / world() + 4 * LAYERS, share
    assert same_bytes(logits(model), expected["logits"])
    full = fsdp.full_state_dict(model)
    assert rank() or not differing(full, expected["state_dict"]), differing(full, expected["state_dict"])


def check_first_models(accelerator, folder):
    """Cut without being asked for, as long as none has been sharded: loaded first, then sharded one by one."""
    wanted = [(CELL, False), (CELL, True), (("bf16", False, "bf16"), False), (("uint8", True, "bf16"), True)]
    models = [model_of(folder, cell, packed) for cell, packed in wanted]
    assert all(is_cut(model) for model in models)
    for model, (cell, _) in zip(models, wanted, strict=True):
        check_equal(prepare(accelerator, model), expected_of(folder, cell))


def check_later_model(folder):
    """What is loaded after the first model was sharded is whole, and runs on one rank alone."""
    if rank() == 0:
        model = model_of(folder)
        assert not is_cut(model)
        assert same_bytes(logits(model), expected_of(folder)["logits"])
        layer = linears(model)["model.layers.0.self_attn.q_proj"]
        dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    dist.barrier()


# ---- asked for: BITSHARD_CUT=1 ----


def check_model(accelerator, cell, packed, folder):
    with environment(BITSHARD_CUT="1"):
        model = model_of(folder, cell, packed)
    assert is_cut(model)
    check_equal(prepare(accelerator, model), expected_of(folder, cell))


def check_other_mesh(folder):
    """Hybrid sharding has other parts."""
    mesh = init_device_mesh("cpu", (world(), 1), mesh_dim_names=("replicate", "shard"))
    texts = []
    for other in (mesh, mesh["shard"]):
        with environment(BITSHARD_CUT="1"):
            model = model_of(folder)
        assert is_cut(model)
        shard = functools.partial(fully_shard, model.model.layers[0], mesh=other)
        texts.append(refused(shard, "BITSHARD_CUT=0"))
    return texts


def check_hybrid_of_accelerate(folder):
    """Where accelerate's environment says so before loading, weights are loaded whole."""
    with environment(PARALLELISM_CONFIG_DP_REPLICATE_SIZE=str(world()), PARALLELISM_CONFIG_DP_SHARD_SIZE="1"):
        with environment(BITSHARD_CUT=None):
            assert not is_cut(model_of(folder))


def check_planted(accelerator, folder):
    """One changed byte on the last rank: logits on every rank and one key of the state dict differ."""
    with environment(BITSHARD_CUT="1"):
        model = model_of(folder)
    expected = expected_of(folder)
    model = prepare(accelerator, model)
    name, layer = list(linears(model).items())[4]
    if rank() == world() - 1:
        layer.weight._local_tensor.plain().view(-1).view(torch.uint8)[7] ^= 0x55
    full = fsdp.full_state_dict(model)
    assert rank() or differing(full, expected["state_dict"]) == [f"{name}.weight"], differing(
        full, expected["state_dict"]
    )
    try:
        found = logits(model)
    except (ValueError, RuntimeError) as error:  # what was gathered is compared with what was quantized
        return str(error)
    assert not same_bytes(found, expected["logits"])
    return "logits differ"


def check_different_files(accelerator, folder):
    """The last rank has another up_proj: the first forward raises on all ranks, instead of mixing two models."""
    path = f"{folder}/{'other-dense' if rank() == world() - 1 else 'dense'}"
    with environment(BITSHARD_CUT="1"):
        model = load_from(path, quantization_config=quantization(), device_map="cpu")
    assert is_cut(model)
    model = prepare(accelerator, model)
    text = refused(lambda: logits(model))
    assert "imed out" not in text and "closed" not in text, text
    return text


def checks():
    accelerator = Accelerator()
    asked = {
        f"model_{name_of(*cell)}_{'packed' if packed else 'dense'}": functools.partial(
            check_model, accelerator, cell, packed
        )
        for cell, packed in (EVERY if world() == 2 else HALF)
    }
    return {
        "memory": check_memory,
        "reads_raise": check_reads_raise,
        "state_dicts": check_state_dicts,
        "lone_reads_raise": check_lone_reads_raise,
        "dequantize": check_dequantize,
        "late_dequantize": check_late_dequantize,
        "dora": check_dora,
        "other_weights": check_other_weights,
        "lone_dequantize": check_lone_dequantize,
        "dora_again": check_dora,
        "switched_off": check_switched_off,
        "without_efficient_loading": check_without_efficient_loading,
        "hybrid_of_accelerate": check_hybrid_of_accelerate,
        **{f"fault_{name}": functools.partial(check_fault, name) for name in (faults.FAULTS if world() == 2 else ())},
        "first_models": functools.partial(check_first_models, accelerator),
        "later_model": check_later_model,
        **asked,
        "other_mesh": check_other_mesh,
        "planted": functools.partial(check_planted, accelerator),
        "different_files": functools.partial(check_different_files, accelerator),
    }


if __name__ == "__main__":
    os.environ["BITSHARD_CUT_TIMEOUT"] = str(PATIENCE)
    arguments = start()
    run(checks(), arguments)
