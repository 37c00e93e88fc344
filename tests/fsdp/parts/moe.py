"""Mixture-of-experts models with 4-bit experts, sharded in every way: bytes, logits and losses of one process.

    torchrun --nproc-per-node 2 tests/fsdp/parts/moe.py --dir DIR --out DIR/moe2

DIR is made by tests/sharding/test_fsdp_experts.py: dense files of tiny models, one folder each.
"""

import copy
import dataclasses
import functools
import glob
import itertools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from bitshard import experts, fsdp, functional, lora
from bitshard.experts import modules
from bitshard.transformers import FourBitConfig, dense_config
from bitshard.weights import inventory
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from shared import environment, rank, refused, run, same_bytes, start, world
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[2]))
from helpers import moe  # noqa: E402
from helpers.bytes import as_bytes  # noqa: E402

FAMILIES = tuple(moe.FAMILIES)


def config(nested, storage=None):
    return FourBitConfig(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested, bnb_4bit_quant_storage=storage)


def whole(path, nested=None, dtype=torch.float32, **options):
    """The model of a folder in this process: from dense files, or without `nested` from packed ones."""
    if nested is not None:
        options["quantization_config"] = config(nested, None if dtype is torch.float32 else dtype)
    with environment(BITSHARD_CUT="0", FSDP_CPU_RAM_EFFICIENT_LOADING="false"):  # a float container, for FSDP1
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options).eval()


def shard(model, units=None, **options):
    for unit in units or model.model.layers:
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def held_stacks(model):
    return {
        f"{path}.{name}": held for path, module in modules.found(model) for name, held in module.packed_stacks.items()
    }


def check_exact(model, reference):
    """Gathered bytes and scales of every stack are those of the reference; logits too; shards of the right size."""
    theirs = {name: held.weight for name, held in held_stacks(reference).items()}
    for name, held in held_stacks(model).items():
        weight, expected = held.shard, theirs[name]
        assert isinstance(weight, DTensor), type(weight)
        packed, state = functional.gather.gathered(weight, held.state)
        assert same_bytes(packed.view(torch.uint8), expected.data.view(torch.uint8)), name
        assert same_bytes(state.absmax, expected.quant_state.absmax) and state.kind is expected.quant_state.kind, name
        parts, place = functional.gather.shard_world(weight)
        rows = -(-weight.size(0) // parts)
        assert weight._local_tensor.size(0) == max(0, min(rows, weight.size(0) - place * rows)), name
    assert torch.equal(moe.logits(model), moe.logits(reference))


def check_loaded(folder, family, nested, how):
    """From dense files, and from packed ones."""
    path, packed = f"{folder}/{family}", f"{folder}/{family}-{'nested' if nested else 'plain'}"
    reference = whole(path, nested)
    for source, options in ((path, {"quantization_config": config(nested)}), (packed, {})):
        check_exact(how(source, **options), reference)


def in_parts(path, **options):
    """Each rank keeps its part from loading on."""
    with environment(BITSHARD_CUT="1"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    assert all(held.place.name == "PART" for held in held_stacks(model).values())
    return shard(model)


def native(path, plan=None, **options):
    """transformers shards before it loads."""
    from transformers.distributed import DistributedConfig

    sharded = {"distributed_config": DistributedConfig(**(plan or {"fsdp_size": world()}))}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **sharded, **options).eval()


def by_units(path, **options):
    return fsdp.load(path, dtype=torch.float32, progress=False, **options)


def units_of_experts(path, **options):
    """The experts module itself is a unit."""
    model = whole(path, **options)
    return shard(model, [unit for layer in model.model.layers for unit in (layer.mlp.experts, layer)])


def adapted(family, folder, dtype=torch.float32):
    return with_adapters(whole(f"{folder}/{family}", True, dtype=dtype), dtype)


def with_adapters(model, dtype=torch.float32):
    torch.manual_seed(1)
    stacks = sorted({".".join(name.split(".")[-2:]) for name in held_stacks(model)})
    settings = LoraConfig(r=4, target_modules=["o_proj"], target_parameters=stacks, init_lora_weights=False)
    model = get_peft_model(model, settings)
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(dtype)  # FSDP1's flat parameters have one dtype
    return model


def losses(model, steps=3):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    found = []
    for _ in range(steps):
        loss = model(input_ids=moe.TOKENS, labels=moe.TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def check_training(folder, family, how, checkpointing=False, fused=False, dtype=torch.float32):
    """With peft's adapters on stacks and a dense layer: the losses of one process."""
    model = adapted(family, folder, dtype)
    if fused:
        assert not lora.fuse(model).left, lora.report(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = losses(copy.deepcopy(model).train())
    inner = model.base_model.model
    layers = getattr(inner, inner.base_model_prefix).layers
    if how == "fsdp2":
        for layer in layers:
            fully_shard(layer)
        model = fully_shard(model)
    else:
        policy = ModuleWrapPolicy({type(layers[0])})
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    found = losses(model.train())
    bound = 1e-5 if dtype is torch.float32 else 1e-3
    assert max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)) < bound, (found, expected)
    assert expected[-1] < expected[0]
    if fused:
        assert not lora.report(model).left, lora.report(model)
    return fsdp.describe(model)


def check_late_adapters(folder, family, how):
    """Adapters on stacks that were loaded into shards have the shapes and losses of one process."""
    expected = losses(adapted(family, folder).train())
    model = with_adapters(how(f"{folder}/{family}-nested"))
    assert fsdp.shard_adapters(model) > 0 and not lora.fuse(model).left, lora.report(model)
    found = losses(model.train())
    assert max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)) < 1e-5, (found, expected)
    assert expected[-1] < expected[0]


def check_fsdp1(folder, family, orig):
    """A frozen model."""
    model = whole(f"{folder}/{family}", True).requires_grad_(False)
    expected = moe.logits(model)
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    options = {"use_orig_params": orig, "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    for _ in range(2):
        assert torch.equal(moe.logits(model), expected)


def check_saved(folder, family):
    """Streamed out of shards: the files of one process; in 16 bits; and a state dict of whole tensors, both ways."""
    reference = whole(f"{folder}/{family}", True)
    model = shard(whole(f"{folder}/{family}", True))
    out = f"{folder}/saved-{family}-{world()}"
    fsdp.save_pretrained(model, out, progress=False)
    fsdp.save_pretrained(model, f"{out}-values", dtype=torch.float32, progress=False)
    dist.barrier()
    again = whole(out)
    assert torch.equal(moe.logits(again), moe.logits(reference))
    values = whole(f"{out}-values")
    assert (moe.logits(values) - moe.logits(reference)).abs().max() < 1e-4
    full = fsdp.full_state_dict(model)
    other = shard(whole(f"{folder}/{family}-other", True))
    if rank() > 0:
        full = {}
    fsdp.load_full_state_dict(other, full, broadcast_from_rank0=True)
    check_exact(other, reference)


def check_distributed_checkpoint(folder, family, **options):
    """What two ranks write, two, three and four read."""
    reference, path = whole(f"{folder}/{family}", True), f"{folder}/dcp-{family}"
    if world() == 2:
        model = shard(whole(f"{folder}/{family}", True))
        moe.logits(model)
        dcp_save({"model": model.state_dict()}, checkpoint_id=path)
    other = shard(whole(f"{folder}/{family}-other", True), **options)
    state = {"model": other.state_dict()}
    dcp_load(state, checkpoint_id=path)
    other.load_state_dict(state["model"])
    check_exact(other, reference)


def check_published(folder, format):
    """MXFP4 and FP8 files in parts: the bytes of one process. Other ways of loading say how to convert them."""
    path = f"{folder}/{format}"
    options = {"config": dense_config(path), "quantization_config": config(True)}
    with environment(BITSHARD_CUT="0", FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    check_exact(in_parts(path, **options), reference)
    texts = [refused(lambda: by_units(path), "dense_config", format)]
    files = glob.glob(f"{path}/*.safetensors")
    for settings in (config(True), None):
        load = functools.partial(fsdp.load, dense_config(path), files, quantization_config=settings, progress=False)
        texts.append(refused(load, {"mxfp4": "is missing", "fp8": "float8_e4m3fn"}[format]))
    return texts


def mxfp4():
    return FourBitConfig(bnb_4bit_quant_type="mxfp4")


def check_kept_nvfp4(folder, layout, how):
    """Files of ModelOpt or compressed-tensors: their own bytes in shards, gathered, and in files again.

    Of experts that the files have one by one each keeps its global scales of gate and up.
    """
    path, settings = f"{folder}/nvfp4-{layout}", FourBitConfig(bnb_4bit_quant_type="nvfp4")
    with environment(BITSHARD_CUT="0", FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        reference = AutoModelForCausalLM.from_pretrained(
            path, config=dense_config(path), quantization_config=settings, dtype=torch.float32
        ).eval()
    if how == "by_units":
        model = fsdp.load(path, quantization_config=settings, dtype=torch.float32, progress=False).eval()
    elif how == "native" and held_stacks(reference):
        return refused(
            lambda: native(path, config=dense_config(path), quantization_config=settings), "bitshard.fsdp.load"
        )
    else:
        model = globals()[how](path, config=dense_config(path), quantization_config=settings)
    found, wanted = (dict(inventory.holders(each)) for each in (model, reference))
    assert found.keys() == wanted.keys() and found
    for name, held in found.items():
        packed, state = functional.gather.gathered(held.shard, held.state)
        theirs = wanted[name]
        assert same_bytes(packed.view(torch.uint8), theirs.weight.data.view(torch.uint8)), name
        assert same_bytes(state.absmax, theirs.state.absmax), name
        assert same_bytes(state.state2.absmax, theirs.state.state2.absmax), name
    assert torch.equal(moe.logits(model), moe.logits(reference))
    fsdp.save_pretrained(model, f"{path}-{how}", progress=False)
    dist.barrier()
    files_equal(f"{path}-{how}", path)


def files_equal(folder, other):
    """The same tensors, byte for byte, under the same names; and what the configs say of the format."""
    found, wanted = (
        {name: as_bytes(t) for name, t in load_file(f"{f}/model.safetensors").items()} for f in (folder, other)
    )
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    wrong = [name for name, data in wanted.items() if not torch.equal(found[name], data)]
    assert not wrong, wrong
    configs = (json.loads(Path(f, "config.json").read_text())["quantization_config"] for f in (folder, other))
    assert next(configs) == next(configs)


def check_kept_mxfp4(folder, how):
    """gpt-oss's own bytes in shards, in training, and in files again."""
    path = f"{folder}/mxfp4"
    options = {"config": dense_config(path), "quantization_config": mxfp4(), "dtype": torch.float32}
    with environment(BITSHARD_CUT="0", FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        reference = AutoModelForCausalLM.from_pretrained(path, **options).eval()
    if how == "by_units":
        model = fsdp.load(path, quantization_config=mxfp4(), dtype=torch.float32, progress=False).eval()
    elif how in ("in_parts", "native"):
        model = globals()[how](path, config=options["config"], quantization_config=mxfp4())
    else:
        with environment(BITSHARD_CUT="0", FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
            model = AutoModelForCausalLM.from_pretrained(path, **options).eval().requires_grad_(False)
        wrap = {"auto_wrap_policy": ModuleWrapPolicy({type(model.model.layers[0])}), "device_id": torch.device("cpu")}
        model = shard(model) if how == "whole" else FullyShardedDataParallel(model, use_orig_params=True, **wrap)
    if how == "fsdp1":
        assert torch.equal(moe.logits(model), moe.logits(reference))
    else:
        check_exact(model, reference)
    assert {held.kind.name for held in held_stacks(model).values()} == {"mxfp4_experts"}
    fsdp.save_pretrained(model, f"{folder}/mxfp4-{how}", progress=False)
    dist.barrier()
    files_equal(f"{folder}/mxfp4-{how}", path)
    x = moe.TOKENS.clone()
    model(input_ids=x, labels=x)  # forward changes no weight
    fsdp.save_pretrained(model, f"{folder}/mxfp4-{how}-dense", dtype=torch.float32, progress=False)
    if rank() == 0:
        dense = AutoModelForCausalLM.from_pretrained(f"{folder}/mxfp4-{how}-dense", dtype=torch.float32).eval()
        assert (moe.logits(dense) - moe.logits(reference)).abs().max() < 1e-4
    dist.barrier()


def check_kept_in_state_dicts(folder):
    """Distributed checkpoints, and whole state dicts, into shards that had other bytes."""

    def load(name):
        with environment(BITSHARD_CUT="0", FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
            options = {"config": dense_config(f"{folder}/{name}"), "quantization_config": mxfp4()}
            return AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32, **options).eval()

    reference, model, path = load("mxfp4"), shard(load("mxfp4")), f"{folder}/dcp-mxfp4"
    moe.logits(model)
    dcp_save({"model": model.state_dict()}, checkpoint_id=path)
    full = {key: value.clone() for key, value in reference.state_dict().items()}
    found = fsdp.full_state_dict(model)
    assert rank() or all(same_bytes(found[key], value) for key, value in full.items() if "quant_state" not in key)
    for way in ("distributed", "full"):
        other = shard(load("mxfp4-other"))
        assert not torch.equal(moe.logits(other), moe.logits(reference))
        if way == "full":
            fsdp.load_full_state_dict(other, full)
        else:
            state = {"model": other.state_dict()}
            dcp_load(state, checkpoint_id=path)
            other.load_state_dict(state["model"])
        check_exact(other, reference)


def check_parallel_plans(folder, family):
    """Expert and tensor parallelism are refused in one line."""
    from transformers.distributed import DistributedConfig

    known = {field.name for field in dataclasses.fields(DistributedConfig)}
    plans = ({"ep_size": 2, "fsdp_size": 2}, {"tp_size": 2, "tp_plan": "auto"})
    texts = []
    for plan in plans:
        if known.issuperset(plan):
            load = functools.partial(native, f"{folder}/{family}", quantization_config=config(True), plan=plan)
            texts.append(refused(load, f"({next(iter(plan))}=2)", "sharded by FSDP2"))
    assert texts
    return texts


def check_offload(folder, family):
    """Shards and scales stay on the CPU (here all does): bytes, and twice the logits."""
    reference = whole(f"{folder}/{family}", True)
    model = shard(whole(f"{folder}/{family}", True), offload_policy=CPUOffloadPolicy(pin_memory=False))
    for _ in range(2):
        check_exact(model, reference)


def check_hybrid(folder, family):
    """Two replicas of two shards: bytes, logits, checkpoints of another number of ranks, and whole state dicts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_distributed_checkpoint(folder, family, mesh=mesh)
    reference = whole(f"{folder}/{family}", True)
    model = shard(whole(f"{folder}/{family}", True), mesh=mesh)
    check_exact(model, reference)
    full = fsdp.full_state_dict(model)
    other = shard(whole(f"{folder}/{family}-other", True), mesh=mesh)
    fsdp.load_full_state_dict(other, full if rank() == 0 else {}, broadcast_from_rank0=True)
    check_exact(other, reference)


def check_merged(folder, family):
    """`save_pretrained(merge=True)`: the bytes of peft's merge in one process, and in 32 bits the adapted logits."""
    model = adapted(family, folder)
    alone = copy.deepcopy(model)
    y = moe.logits(alone)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    model = fully_shard(model)
    out = f"{folder}/merged-{family}-{world()}"
    fsdp.save_pretrained(model, out, merge=True, progress=False)
    fsdp.save_pretrained(model, f"{out}-values", merge=True, dtype=torch.float32, progress=False)
    dist.barrier()
    assert (moe.logits(whole(f"{out}-values")) - y).abs().max() < 1e-4
    files = {key: value for file in glob.glob(f"{out}/*.safetensors") for key, value in load_file(file).items()}
    merged = {key: value for key, value in alone.merge_and_unload().state_dict().items() if "experts" in key}
    assert len(merged) > 8 and all(same_bytes(files[key], value) for key, value in merged.items())


def stack_bytes(model):
    """Bytes and scales of every stack, whole."""
    found = {}
    for name, held in held_stacks(model).items():
        local = held.shard is None
        packed, state = (held.weight, held.state) if local else functional.gather.gathered(held.shard, held.state)
        found[name] = [as_bytes(part).clone() for part in (packed, state.absmax, state.state2.absmax)]
    return found


def equal_stacks(found, expected):
    return all(
        torch.equal(a, b) for name in expected for a, b in zip(found[name], expected[name], strict=True)
    ) and len(found) == len(expected)


def check_merging(folder, family):
    """peft's merge and unmerge in shards, and unmerge where the model was merged first: the bytes of one process."""
    alone = adapted(family, folder)
    before, y = stack_bytes(alone), moe.logits(alone)
    first, second = copy.deepcopy(alone), copy.deepcopy(alone)
    with environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):  # quantized again into a float container, for torch 2.11
        second.merge_adapter()
    merged = stack_bytes(second)
    for model in (first, second):
        shard(model, model.base_model.model.model.layers)
        for _ in range(2):
            model.merge_adapter()  # nothing where it is merged
            assert equal_stacks(stack_bytes(model), merged)
            model.unmerge_adapter()
            assert equal_stacks(stack_bytes(model), before) and torch.equal(moe.logits(model), y)
            model.reshard()


def check_merging_fsdp1(folder, family):
    """Refused with peft's lists as they were: FSDP1 has freed the weights."""
    for merged in (False, True):
        with environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):  # a float container, for FSDP1
            model = adapted(family, folder)
            if merged:
                model.merge_adapter()
        inner = model.base_model.model
        policy = ModuleWrapPolicy({type(inner.model.layers[0])})
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
        expected = moe.logits(wrapped)
        tuners = [module for module in model.modules() if hasattr(module, "parameter_name")]
        for tuner in tuners:
            for _ in range(2):
                refused(tuner.unmerge if merged else tuner.merge, "FSDP1 has freed")
                assert tuner.merged_adapters == ["default"] * merged, tuner.merged_adapters
        assert tuners and torch.equal(moe.logits(wrapped), expected)


def check_dense(folder, family, how):
    """What a server is sent: names, order and bits of one process, behind a step of training too."""
    model = adapted(family, folder)
    expected = list(fsdp.dense_weights(model, torch.float32))
    announced = fsdp.dense_weights(model, torch.float32).metadata()
    if how == "fsdp2":
        model = shard(model, model.base_model.model.model.layers)
    else:
        policy = ModuleWrapPolicy({type(model.base_model.model.model.layers[0])})
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    for _ in range(2):
        weights = fsdp.dense_weights(lambda: model, torch.float32)
        got = [(name, tensor.clone()) for name, tensor in weights]
        order = [name for name, _ in got]
        assert order == [name for name, _, _ in announced], order
        assert announced == weights.metadata(), weights.metadata()
        assert all(same_bytes(tensor, other) for (_, tensor), (_, other) in zip(got, expected, strict=True))
        moe.logits(model)  # leaves the last unit gathered
    losses(model, 1)
    trained = dict(fsdp.dense_weights(model, torch.float32))
    changed = [name for name, tensor in expected if not torch.equal(trained[name], tensor)]
    assert changed and all("experts" in name or "o_proj" in name for name in changed), changed


def check_quantizing_shards(folder, family):
    """`experts.quantize` of a model that is sharded already is refused, and changes nothing."""
    dense = shard(AutoModelForCausalLM.from_pretrained(f"{folder}/{family}", dtype=torch.float32).eval())
    y = moe.logits(dense)
    text = refused(lambda: experts.quantize(dense), "sharded")
    assert torch.equal(moe.logits(dense), y)
    return text


def checks():
    if world() == 4:
        return {
            f"hybrid_{family}": functools.partial(check_hybrid, family=family) for family in ("qwen3_moe", "gpt_oss")
        }
    loaders = (in_parts, native, by_units, units_of_experts)
    cells = [("qwen3_moe", True), ("gpt_oss", False)] if world() == 2 else [("few", True)]
    found = {
        f"{how.__name__}_{family}_{'nested' if nested else 'plain'}": functools.partial(
            check_loaded, family=family, nested=nested, how=how
        )
        for family, nested in cells
        for how in loaders
        if world() == 2 or how is not native
    }
    read = functools.partial(check_distributed_checkpoint, family="qwen3_moe")
    if world() == 3:
        few = functools.partial(check_training, family="few", how="fsdp2")
        return found | {"training_fsdp2_few": few, "distributed_checkpoint": read}
    for family, how in itertools.product(("qwen3_moe", "gpt_oss"), (native, by_units)):
        name = f"late_adapters_{how.__name__}_{family}"
        found[name] = functools.partial(check_late_adapters, family=family, how=how)
    for family, how in itertools.product(FAMILIES, ("fsdp1", "fsdp2")):
        found[f"training_{how}_{family}"] = functools.partial(check_training, family=family, how=how)
    for how in ("fsdp1", "fsdp2"):
        half = functools.partial(check_training, family="qwen3_moe", how=how, dtype=torch.bfloat16)
        found[f"training_{how}_in_16_bits"] = half
    for family in ("qwen3_moe", "gpt_oss"):
        found[f"saved_{family}"] = functools.partial(check_saved, family=family)
        found[f"merged_{family}"] = functools.partial(check_merged, family=family)
        found[f"merging_{family}"] = functools.partial(check_merging, family=family)
    found["merging_fsdp1"] = functools.partial(check_merging_fsdp1, family="qwen3_moe")
    for family, how in itertools.product(FAMILIES, ("fsdp1", "fsdp2")):
        found[f"dense_{how}_{family}"] = functools.partial(check_dense, family=family, how=how)
    again = functools.partial(check_training, family="qwen3_moe", how="fsdp2", checkpointing=True)
    found["training_checkpointing"] = again
    found["fsdp1_orig"] = functools.partial(check_fsdp1, family="gpt_oss", orig=True)
    found["fsdp1_flat"] = functools.partial(check_fsdp1, family="gpt_oss", orig=False)
    for how in ("fsdp1", "fsdp2"):
        again = functools.partial(check_training, family="gpt_oss", how=how, fused=True)
        found[f"training_fused_{how}"] = again
    for how in ("by_units", "in_parts", "native", "whole", "fsdp1"):
        found[f"kept_mxfp4_{how}"] = functools.partial(check_kept_mxfp4, how=how)
    found["kept_mxfp4_state_dicts"] = check_kept_in_state_dicts
    for layout, how in itertools.product(moe.NVFP4, ("by_units", "native", "in_parts")):
        found[f"kept_nvfp4_{layout}_{how}"] = functools.partial(check_kept_nvfp4, layout=layout, how=how)
    for format in ("mxfp4", "fp8"):
        found[f"published_{format}"] = functools.partial(check_published, format=format)
    found["parallel_plans"] = functools.partial(check_parallel_plans, family="qwen3_moe")
    found["offload"] = functools.partial(check_offload, family="gpt_oss")
    found["distributed_checkpoint"] = read
    found["distributed_checkpoint_gpt_oss"] = functools.partial(check_distributed_checkpoint, family="gpt_oss")
    found["quantizing_shards"] = functools.partial(check_quantizing_shards, family="qwen3_moe")
    return found


if __name__ == "__main__":
    arguments = start()
    run(checks(), arguments)
