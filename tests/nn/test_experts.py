"""Mixture-of-experts models in one process: experts in 4 bits give what the decoded experts give, in files too."""

import copy
import gc
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from bitshard import experts, functional, kinds
from bitshard.experts import forward, modules
from bitshard.process.registry import QUANT_METHOD
from bitshard.tensor import Params4bit
from bitshard.transformers import FourBitConfig, dense_config
from bitshard.weights import inventory
from helpers import moe
from helpers.bytes import same_bytes
from helpers.copies import pickled
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Dense files of each family."""
    folder = tmp_path_factory.mktemp("moe")
    for family in moe.FAMILIES:
        moe.model(family).save_pretrained(folder / family)
    return folder


def load(path, dtype=torch.float32, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map="cpu", **options).eval()


def config(**settings):
    return FourBitConfig(bnb_4bit_quant_type="nf4", **settings)


def gap(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def stacks(model):
    """{name: (holder, parameter)} of all packed stacks."""
    return {
        f"{path}.{name}": (held, module._parameters[name])
        for path, module in modules.found(model)
        for name, held in module.packed_stacks.items()
    }


# ---- loading, products, files ----


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("family", moe.FAMILIES)
def test_families(folders, tmp_path, family, nested):
    """Loaded from dense files: the logits of decoded experts; saved and read again: the same bytes and logits."""
    model = load(folders / family, quantization_config=config(bnb_4bit_use_double_quant=nested))
    dense = load(folders / family)
    found = stacks(model)
    assert found and all(type(p) is Params4bit and p.bnb_quantized and p.dim() == 2 for _, p in found.values())
    assert all(held.state.kind is kinds.EXPERTS and held.state.nested is nested for held, _ in found.values())
    y = moe.logits(model)
    assert gap(y, moe.logits(moe.decoded(dense, model))) < 1e-5
    assert gap(y, moe.logits(dense)) > 1e-3
    text, share, _ = inventory.line(model)
    assert f", {len(stacks(model))} of them stacks of experts, " in text
    assert share > 0.5
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == QUANT_METHOD and "load_in_4bit" not in said
    again = load(tmp_path)
    for name, (held, parameter) in stacks(again).items():
        assert same_bytes(parameter.data, found[name][1].data) and held.state == found[name][0].state
    assert torch.equal(moe.logits(again), y)


def test_bytes_are_those_of_each_expert(folders):
    """Whatever the other experts are; in [N, K] where the module shows [E, K, N], too."""
    for family in ("qwen3_moe", "gpt_oss"):
        dense, model = load(folders / family), load(folders / family, quantization_config=config())
        for (path, module), (_, theirs) in zip(modules.found(dense), modules.found(model), strict=True):
            for name, held in theirs.packed_stacks.items():
                values, packed = module._parameters[name].data, theirs._parameters[name]
                assert held.shown == values.shape and held.transposed is (family == "gpt_oss")
                for e, expert in enumerate(held.oriented(values)):
                    own, _ = functional.quantize_4bit(expert, quant_type="nf4")
                    rows = packed.saved_data().view(torch.uint8).view(len(values), -1)
                    assert same_bytes(own.view(-1), rows[e]), (path, name, e)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_type": "fp4", "blocksize": 32, "compress_statistics": False},
        {"quant_storage": torch.bfloat16, "blocksize": 128},
        {"quant_storage": torch.float32, "blocksize": 1024, "compute_dtype": torch.bfloat16},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_there(settings, dtype):
    model = moe.model("qwen3_moe", dtype=dtype)
    dense = copy.deepcopy(model)
    assert experts.quantize(model, **settings) == 4
    for held, parameter in stacks(model).values():
        assert parameter.dtype is dtype and held.storage is settings.get("quant_storage", torch.uint8)
        assert held.state.blocksize == settings["blocksize"] and held.state.dtype is dtype
    exact = dtype is torch.float32 and "compute_dtype" not in settings
    assert gap(moe.logits(model).float(), moe.logits(moe.decoded(dense, model)).float()) < (1e-5 if exact else 2e-2)


def test_skip_lists(folders):
    skip = ["model.layers.1.mlp.experts", "lm_head"]
    model = load(folders / "qwen3_moe", quantization_config=config(llm_int8_skip_modules=skip))
    assert [path for path, module in modules.found(model) if isinstance(module, modules.PackedExperts)] == [
        "model.layers.0.mlp.experts"
    ]
    dense = load(folders / "qwen3_moe")
    mixed = copy.deepcopy(dense)
    first = dict(modules.found(mixed))["model.layers.0.mlp.experts"]
    for name, (held, parameter) in stacks(model.model.layers[0]).items():
        leaf = name.rpartition(".")[2]
        first._parameters[leaf].data = functional.dequantize_4bit(parameter.data, held.state)
    other = load(
        folders / "qwen3_moe", quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    )
    for name, module in mixed.named_modules():
        if "Linear4bit" in type(dict(other.named_modules())[name]).__name__:
            weight = dict(other.named_modules())[name].weight
            module.weight.data = functional.dequantize_4bit(weight.data, weight.quant_state)
    assert gap(moe.logits(model), moe.logits(mixed)) < 1e-5
    model = moe.model("qwen3_moe")
    assert experts.quantize(model, skip=("layers.0",)) == 2


def test_enable_and_disable(folders):
    stock = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    path = folders / "mixtral"
    experts.enable(), experts.enable()
    try:
        model = load(path, quantization_config=stock)
    finally:
        experts.disable(), experts.disable()
    assert len(stacks(model)) == 4 and type(model.config.quantization_config) is FourBitConfig
    assert same_bytes(moe.logits(model), moe.logits(load(path, quantization_config=config())))
    assert not any(isinstance(m, modules.PackedExperts) for m in load(path, quantization_config=stock).modules())


def test_one_stack_is_dense_at_a_time(folders, monkeypatch):
    """While a model is loaded; and no forward or backward makes a float copy of a stack."""
    alive, most = [0], [0]
    quantize = functional.quantize_experts_4bit
    model = load(folders / "qwen3_moe", quantization_config=config())
    sizes = {held.shape.numel() for held, _ in stacks(model).values()}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point() and out.numel() in sizes:
                assert out.untyped_storage().nbytes() < out.numel() * 4 or func is torch.ops.aten.alias.default, func
            return out

    embedded = torch.randn(2, 4, 64, requires_grad=True)
    with Watch():
        model(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad.isfinite().all()

    def dense():
        """Addresses of the float tensors of a stack's size."""
        plain = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta]
        own = [t for t in plain if t.is_floating_point() and t.numel() in sizes]
        return {t.untyped_storage().data_ptr() for t in own if t.untyped_storage().nbytes() >= 4 * t.numel()}

    def counted(values, **settings):
        gc.collect()
        most[0] = max(most[0], len(dense() - before - {0}))
        alive[0] += 1
        return quantize(values, **settings)

    before = dense()
    monkeypatch.setattr(kinds.EXPERTS, "quantize", counted)
    load(folders / "qwen3_moe", quantization_config=config())
    assert alive[0] == 4 and most[0] <= 2  # a stack, and what it was merged of


# ---- files of other formats ----

PUBLISHED = {
    "mxfp4": ("gpt_oss", moe.save_mxfp4, {"intermediate_size": 64}),
    "fp8": (
        "deepseek_v3",
        moe.save_fp8,
        dict.fromkeys(("hidden_size", "moe_intermediate_size", "intermediate_size"), 128),
    ),
}


@pytest.mark.parametrize("format", PUBLISHED)
def test_published_formats_become_4_bit_while_loading(tmp_path, format):
    """The bytes are those of decoding with transformers and quantizing then; saved, the files are 4-bit ones."""
    family, save, sizes = PUBLISHED[format]
    save(moe.model(family, 4, torch.bfloat16, **sizes), tmp_path / "from")
    decode = {"mxfp4": transformers.Mxfp4Config, "fp8": transformers.FineGrainedFP8Config}[format](dequantize=True)
    dense = load(tmp_path / "from", quantization_config=decode, dtype=torch.bfloat16)
    values = {name: value.clone() for name, value in dense.state_dict().items()}
    experts.quantize(dense, quant_type="nf4")
    with pytest.raises(ValueError, match="Config"):  # transformers' own words
        load(tmp_path / "from", quantization_config=config(), dtype=torch.bfloat16)
    found = load(
        tmp_path / "from",
        config=dense_config(tmp_path / "from"),
        quantization_config=config(bnb_4bit_use_double_quant=True),
        dtype=torch.bfloat16,
    )
    mine, theirs = stacks(found), stacks(dense)
    assert mine.keys() == theirs.keys() and mine
    for name, (held, parameter) in mine.items():
        other, expected = theirs[name]
        assert same_bytes(parameter.data, expected.data) and same_bytes(held.state.absmax, other.state.absmax), name
        assert parameter.dtype is torch.bfloat16 and held.state.dtype is torch.bfloat16
    layers = {name: m for name, m in found.named_modules() if "Linear4bit" in type(m).__name__}
    assert len(layers) > 6
    for name, layer in layers.items():
        packed, _ = functional.quantize_4bit(values[f"{name}.weight"], quant_type="nf4", compress_statistics=True)
        assert same_bytes(layer.weight.data.view(torch.uint8).view(-1), packed.view(-1)), name
    found.save_pretrained(tmp_path / "to")
    again = load(tmp_path / "to", dtype=torch.bfloat16)
    assert torch.equal(moe.logits(again), moe.logits(found))


def test_dense_config_of_other_files(tmp_path, folders):
    assert not hasattr(dense_config(folders / "gpt_oss"), "quantization_config")
    moe.save_mxfp4(moe.model("gpt_oss", intermediate_size=64), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="are gptq, expected one of"):
        dense_config(tmp_path)


# ---- adapters ----


def adapted(family, r=4, **settings):
    """(4-bit model, dense model of its decoded experts), with the same adapters of peft on stacks and q_proj."""
    model = moe.model(family)
    dense = copy.deepcopy(model)
    experts.quantize(model)
    dense = moe.decoded(dense, model)
    lora = {"r": r, "target_modules": ["q_proj"], "target_parameters": TARGETS, "task_type": "CAUSAL_LM"} | settings
    both = [get_peft_model(each, LoraConfig(**lora)) for each in (model, dense)]
    for (_, p), (_, q) in zip(both[0].named_parameters(), both[1].named_parameters(), strict=True):
        if q.requires_grad:
            p.data.normal_(0, 0.05)
            q.data.copy_(p.data)
    return both


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("settings", [{}, {"r": 3, "use_rslora": True}, {"target_modules": "all-linear"}])
def test_adapters_train_as_on_dense_experts(family, checkpointing, settings):
    model, dense = adapted(family, **settings)
    assert model.get_nb_trainable_parameters() == dense.get_nb_trainable_parameters()
    for each in (model, dense):
        each.train()
        if checkpointing:
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for _ in range(2):  # nothing is left of a forward
        losses = [each(input_ids=moe.TOKENS, labels=moe.TOKENS).loss for each in (model, dense)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
        for loss in losses:
            loss.backward()
        grads = {name: p.grad for name, p in dense.named_parameters() if p.grad is not None}
        assert grads and all(gap(p.grad, grads[name]) < 1e-4 for name, p in model.named_parameters() if p.requires_grad)
        model.zero_grad(), dense.zero_grad()
    with model.disable_adapter(), dense.disable_adapter():
        assert gap(moe.logits(model.eval()), moe.logits(dense.eval())) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_merging_and_unmerging(family, tmp_path):
    model, dense = adapted(family)
    model.eval(), dense.eval()
    y, before = moe.logits(model), {name: p.data.clone() for name, (_, p) in stacks(model).items()}
    wanted = {
        f"{path}.{name}": module._parameters[name]
        for each in [copy.deepcopy(dense).merge_and_unload()]
        for path, module in modules.found(each)
        for name in modules.stack_names(module)
    }
    model.save_pretrained(tmp_path)
    model.merge_adapter()
    for name, (held, parameter) in stacks(model).items():
        dense_values = held.oriented(wanted[name.replace("base_model.model.", "").replace("base_layer.", "")].data)
        packed, _ = functional.quantize_experts_4bit(dense_values, 64, True, "nf4", torch.float32)
        codes = (parameter.data.view(torch.uint8) != packed.view(torch.uint8)).float().mean()
        assert not same_bytes(parameter.data, before[name]) and codes < 0.01, name
    assert gap(moe.logits(model), y) < 0.3
    model.unmerge_adapter()
    assert all(same_bytes(p.data, before[name]) for name, (_, p) in stacks(model).items())
    assert gap(moe.logits(model), y) < 1e-5  # of q_proj, which is dense, peft subtracts
    model.load_adapter(tmp_path, "again")
    model.base_model.set_adapter(["default", "again"])
    dense.load_adapter(tmp_path, "again")
    dense.base_model.set_adapter(["default", "again"])
    assert gap(moe.logits(model), moe.logits(dense)) < 1e-5 and gap(moe.logits(model), y) > 1e-3
    model.base_model.set_adapter("default")
    merged = model.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters()) and gap(moe.logits(merged), y) < 0.3


def test_what_peft_refuses_stays_refused():
    model = moe.model("qwen3_moe")
    experts.quantize(model)
    for settings in ({"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}):
        with pytest.raises(ValueError, match="does not work with"):
            get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_parameters=TARGETS, **settings))


# ---- the module ----


def test_copies_and_pickles():
    model = moe.model("gpt_oss")
    experts.quantize(model)
    y = moe.logits(model)
    module = next(module for _, module in modules.found(model))
    assert type(module).__name__ == "GptOssExperts" and isinstance(module, modules.PackedExperts)
    for again in (copy.deepcopy(model), pickled(model)):
        assert torch.equal(moe.logits(again), y)
        other = next(module for _, module in modules.found(again))
        assert (
            other.packed_stacks["down_proj"].owner is other
            and other.down_proj.module is other.packed_stacks["down_proj"]
        )
        other.load_state_dict(module.state_dict())
        assert torch.equal(moe.logits(again), y)
    shallow = copy.copy(module)
    assert shallow.packed_stacks["down_proj"].owner is shallow and module.packed_stacks["down_proj"].owner is module


def test_moves_leave_the_bytes():
    model = moe.model("qwen3_moe")
    experts.quantize(model)
    before = {name: p.data.clone() for name, (_, p) in stacks(model).items()}
    model.half().to(torch.bfloat16).float()
    assert all(same_bytes(p.data, before[name]) and p.dtype is torch.float32 for name, (_, p) in stacks(model).items())
    stack = next(iter(stacks(model).values()))[1]
    with pytest.raises(TypeError, match="would destroy"):
        stack.to(torch.float16)
    for mistake in (lambda: stack + 1, lambda: stack.data.add_(1), lambda: torch.baddbmm(stack, stack, stack, beta=2)):
        with pytest.raises((TypeError, ValueError)):
            mistake()


def test_compiled_without_graph_breaks():
    torch._dynamo.reset()
    model = moe.model("qwen3_moe")
    experts.quantize(model, compress_statistics=True)
    module = next(module for _, module in modules.found(model))
    x, index = torch.randn(6, 64), torch.tensor([[0, 1], [2, 3], [7, 0], [5, 5], [1, 2], [3, 4]])
    weights = torch.rand(6, 2)
    module(x, index, weights)
    call = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(x, index, weights), module(x, index, weights))


def test_experts_of_other_ranks_add_nothing():
    """Expert parallelism: numbers from num_experts on are experts of other ranks."""
    model = moe.model("qwen3_moe")
    experts.quantize(model)
    module = next(module for _, module in modules.found(model))
    x, index, weights = torch.randn(5, 64), torch.tensor([[0, 8], [9, 8], [7, 0], [8, 5], [1, 2]]), torch.rand(5, 2)
    module._is_expert_parallel = True
    here = index < 8
    expected = sum(
        torch.where(here[:, k : k + 1], module(x, index[:, k : k + 1].clamp(max=7), weights[:, k : k + 1]), 0)
        for k in range(2)
    )
    torch.testing.assert_close(module(x, index, weights), expected)


@pytest.mark.parametrize("parallel", [False, True])
def test_wrong_numbers_raise(parallel):
    """As in transformers' own forward: nothing is left out in silence."""
    model = moe.model("qwen3_moe")
    dense = next(module for _, module in modules.found(model))
    dense.config._experts_implementation = "eager"
    x, index, weights = torch.randn(2, 64), torch.tensor([[0, -1], [-3, 9]]), torch.rand(2, 2)
    with pytest.raises(RuntimeError, match="non-negative"):
        dense(x, index, weights)
    experts.quantize(model)
    dense._is_expert_parallel = parallel
    count = 2 if parallel else 3
    with pytest.raises(ValueError, match=f"{count} of 4 .* from -3 to 9, are none of the 8 experts'.*_is_expert_para"):
        dense(x, index, weights)
    with nullcontext() if parallel else pytest.raises(ValueError, match="1 of 4 .* from 0 to 8"):
        dense(x, torch.tensor([[0, 8], [3, 2]]), weights)
    assert dense(x[:0], index[:0], weights[:0]).shape == (0, 64)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_tokens_with_wrong_numbers_are_nan(parallel, adapters, monkeypatch):
    """Where nothing waits to raise, as on a GPU: their rows, and the gradients of a loss that counts them. Other tokens
    are as without them, and a loss of those alone has no gradient for the wrong ones."""
    monkeypatch.setattr(forward, "require_experts", lambda *_: None)
    model = moe.model("qwen3_moe")
    experts.quantize(model)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=8, target_parameters=TARGETS, init_lora_weights=False))
    layer = next(module for module in model.modules() if type(module).__name__ == "Qwen3MoeSparseMoeBlock").experts
    next(module for _, module in modules.found(model))._is_expert_parallel = parallel
    index = torch.tensor([[0, 1], [2, -1], [7, 3], [-(2**40), 9], [4, 3], [5, 0 if parallel else 8]])
    clean, wrong = index.clamp(0, 8 if parallel else 7), torch.tensor([1, 3] if parallel else [1, 3, 5])
    right = [token for token in range(6) if token not in wrong]
    x, weights = torch.randn(6, 64, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    y, expected = layer(x, index, weights), layer(x, clean, weights)
    assert y[wrong].isnan().all() and torch.equal(y[right], expected[right])
    trained = (x, weights, *(p for p in layer.parameters() if p.requires_grad))
    assert len(trained) == (6 if adapters else 2)
    found = torch.autograd.grad(y[right].square().sum(), trained, retain_graph=True)
    assert all(map(torch.equal, found, torch.autograd.grad(expected[right].square().sum(), trained, retain_graph=True)))
    assert not found[0][wrong].any() and not found[1][wrong].any()
    dx, dweights, *of_adapters = torch.autograd.grad(y.square().sum(), trained)
    assert dx[wrong].isnan().all() and dweights[wrong].isnan().any(1).all() and dx[right].isfinite().all()
    assert all(gradient.isnan().any() for gradient in of_adapters)


# ---- mistakes ----


def test_mistakes():
    model = moe.model("qwen3_moe")
    before = model.state_dict()
    for settings, error in (
        ({"blocksize": 2048}, "the 3072 elements of an expert must be a multiple of the blocksize 2048"),
        ({"blocksize": 48}, "blocksize 48"),
        ({"quant_type": "int4"}, "int4"),
        ({"skip": ("experts",)}, "no experts in stacks"),
    ):
        with pytest.raises(ValueError, match=error):
            experts.quantize(model, **settings)
    assert all(value is before[key] or torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.config._experts_implementation != forward.IMPLEMENTATION
    experts.quantize(model)
    with pytest.raises(ValueError, match="4-bit already"):
        experts.quantize(model)
    with pytest.raises(ValueError, match="no experts in stacks"):
        experts.quantize(torch.nn.Linear(4, 4))


@pytest.mark.parametrize("change", ["missing", "short", "scales", "shape"])
def test_files_that_do_not_fit(folders, tmp_path, change):
    """Transformers tells of them, with the numbers, and no model comes back."""
    from safetensors.torch import load_file, save_file

    model = load(folders / "qwen3_moe", quantization_config=config())
    model.save_pretrained(tmp_path)
    path, key = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(path)
    if change == "missing":
        del tensors[f"{key}.absmax"]
    elif change == "short":
        tensors[key] = tensors[key][:-8]
    elif change == "scales":
        tensors[f"{key}.absmax"] = tensors[f"{key}.absmax"][:-1]
    else:
        tensors[f"{key}.quant_state.bitsandbytes__nf4"] = blob(tensors, key, shape=[4, 128, 48])
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises((RuntimeError, ValueError)):
        load(tmp_path)


@pytest.mark.parametrize("change", ["missing", "shape", "all"])
def test_files_with_an_expert_missing_or_of_another_shape(tmp_path, change):
    """One tensor per expert: by transformers and by itself, never a stack of other experts."""
    from safetensors.torch import load_file, save_file

    moe.model("qwen3_moe").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    keys = [key for key in tensors if "layers.1.mlp.experts.3.down_proj" in key]
    assert len(keys) == 1
    if change == "missing":
        del tensors[keys[0]]
    elif change == "shape":
        tensors[keys[0]] = tensors[keys[0]][:, :-4].contiguous()
    else:
        tensors = {key: value for key, value in tensors.items() if "layers.1.mlp.experts" not in key}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises((RuntimeError, ValueError)):
        load(tmp_path, quantization_config=config())


def test_x_that_does_not_fit():
    model = moe.model("qwen3_moe")
    experts.quantize(model)
    module = next(module for _, module in modules.found(model))
    index, weights = torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2)
    for x, kind, words in (
        (torch.randn(2, 63), ValueError, r"\[4, 63\]"),
        (torch.randn(2, 64, device="meta"), (ValueError, RuntimeError), "meta"),
        (torch.zeros(2, 64, dtype=torch.int64), TypeError, "int64"),
        (torch.randn(2, 64, dtype=torch.float64), (TypeError, ValueError), "float64"),
    ):
        with pytest.raises(kind, match=words):
            module(x, index, weights)
    assert module(torch.randn(2, 64), index, weights).shape == (2, 64)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.float16), lambda m: m.half(), lambda m: m.bfloat16()])
def test_casts_of_a_module_leave_the_bytes(cast):
    model = moe.model("gpt_oss")
    experts.quantize(model)
    module = next(module for _, module in modules.found(model))
    before = [parameter.data.clone().view(torch.uint8) for _, parameter in stacks(model).values()]
    try:
        cast(module)
    except (TypeError, ValueError, RuntimeError) as error:
        assert "4-bit" in str(error) and "16" in str(error)  # with the dtypes
    assert all(
        same_bytes(parameter.data.view(torch.uint8), expected)
        for (_, parameter), expected in zip(stacks(model).values(), before, strict=True)
    )


def blob(tensors, key, **changes):
    values = functional.unpack_tensor_to_dict(tensors[f"{key}.quant_state.bitsandbytes__nf4"]) | changes
    return functional.pack_dict_to_tensor({name: value for name, value in values.items() if value is not None})


@pytest.mark.parametrize("nested", [False, True])
def test_flat_stacks_of_parametrize(nested):
    """What bitsandbytes.nn.parametrize writes has the same bytes; its nested scales become plain ones."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    model, other = moe.model("mixtral"), moe.model("mixtral")
    for _, module in modules.found(other):
        for name in modules.stack_names(module):
            replace_parameter_4bit(module, name, compress_statistics=nested, quant_type="nf4")
    entries = {key: value for key, value in other.state_dict().items() if "experts" in key}
    values = {
        key: getattr(dict(other.named_modules())[key.rpartition(".")[0]], key.rpartition(".")[2])
        for key in entries
        if key.endswith("proj")
    }
    experts.quantize(model, compress_statistics=False, quant_type="fp4")
    model.load_state_dict(entries, strict=False)
    for name, (held, parameter) in stacks(model).items():
        assert held.state.kind is kinds.EXPERTS and not held.state.nested and held.state.quant_type == "nf4"
        assert torch.equal(functional.dequantize_4bit(parameter.data, held.state), values[name])
    assert moe.logits(model).isfinite().all()
    oss = moe.model("gpt_oss")
    experts.quantize(oss)
    flat = functional.quantize_4bit(torch.randn(8, 96, 64), quant_type="nf4")[1]
    with pytest.raises(ValueError, match="a flat stack"):
        next(iter(stacks(oss).values()))[0].fitting(flat)


def test_what_peft_asks_of_a_stack():
    """Canaries: where peft asks otherwise, adapters on stacks are to be looked at again."""
    import inspect

    from peft.tuners.lora import layer

    assert 'getattr(param, "ds_shape", param.shape)' in inspect.getsource(layer.ParamWrapper._get_in_out_features)
    assert "torch.baddbmm(W, self.lhs, self.rhs, alpha=self.scaling)" in inspect.getsource(
        layer._LoraFactorsProxy.forward
    )
    assert "param.data += delta_weight" in inspect.getsource(layer.ParamWrapper.merge)
    assert "param.data -= delta_weight" in inspect.getsource(layer.ParamWrapper.unmerge)


def test_without_bitshard_transformers_says_one_line(tmp_path, folders):
    """What reads a folder and does not know the format stops at its name."""
    load(folders / "qwen3_moe", quantization_config=config()).save_pretrained(tmp_path)
    script = (
        "import sys; from transformers import AutoModelForCausalLM as M\n"
        f"try: M.from_pretrained({str(tmp_path)!r}); print('read')\n"
        "except Exception as error: print(str(error)[:200])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert QUANT_METHOD in done.stdout + done.stderr and "read" not in done.stdout


@pytest.mark.parametrize("order, asked", [("bitshard, transformers", "1"), ("transformers, bitsandbytes", "0")])
def test_what_transformers_knows_of_it(order, asked):
    """In either order of imports; with BITSHARD_EXPERTS=1 BitsAndBytesConfig takes experts, without it does not."""
    script = (
        f"import {order}\nfrom transformers.quantizers import auto\n"
        "from transformers import BitsAndBytesConfig\n"
        "given = {'quant_method': 'bitshard_4bit', 'bnb_4bit_quant_type': 'nf4'}\n"
        "made = auto.AutoQuantizationConfig.from_dict(given)\n"
        "print(type(made).__name__, made.bnb_4bit_quant_type, type(auto.AutoHfQuantizer.from_config(made)).__name__,\n"
        "      type(auto.AutoHfQuantizer.from_config(BitsAndBytesConfig(load_in_4bit=True))).__name__)\n"
    )
    environment = os.environ | {"BITSHARD_EXPERTS": asked}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    stock = "FourBitQuantizer" if asked == "1" else "Bnb4BitHfQuantizer"
    assert done.stdout.split() == ["FourBitConfig", "nf4", "FourBitQuantizer", stock], done.stdout


def test_the_page_works(folders, tmp_path):
    """The blocks of docs/experts.md, in their order."""
    text = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")
    first, second, *loading = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    try:
        exec(first, {})
        stock = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model = load(folders / "qwen3_moe", quantization_config=stock)
    finally:
        experts.disable()
    model = get_peft_model(model, eval(second, {"LoraConfig": LoraConfig}))
    assert len(stacks(model)) == 4
    model(input_ids=moe.TOKENS, labels=moe.TOKENS).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert any("experts" in name for name in trained) and any("q_proj" in name for name in trained)
    moe.save_mxfp4(moe.model("gpt_oss", 4, intermediate_size=64), tmp_path)
    values = {"AutoModelForCausalLM": AutoModelForCausalLM, "torch": torch, "name": str(tmp_path)}
    for block, kind in zip(loading, ("mxfp4_experts", "experts"), strict=True):
        exec(block, values)
        assert {held.state.kind.name for held, _ in stacks(values["model"]).values()} == {kind}


def test_the_three_lines_of_drop_in(folders):
    text = (Path(__file__).parents[2] / "docs" / "drop-in.md").read_text(encoding="utf-8")
    values = {}
    try:
        exec(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1], values)
        stock = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model = load(folders / "qwen3_moe", quantization_config=stock)
    finally:
        experts.disable()
    assert len(stacks(model)) == 4
    model = get_peft_model(model, LoraConfig(r=4, target_parameters=values["stacks"]))
    assert sum("experts" in name for name, p in model.named_parameters() if p.requires_grad) == 8


def test_orders_of_rows_are_derived_twice():
    """From tokens to rows sorted by expert and back, as torch's index, with an order that is not its own inverse."""
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    places, token = order.argsort(), order // 2
    assert not torch.equal(order, places)
    for back in (places, places - torch.tensor([0, 6, 0, 0, 6, 0])):  # those of wrong numbers

        def rows(x, back=back):
            return forward.InOrderOfTokens.apply(forward.RowsOfExperts.apply(x, token, back, 2) ** 3, order, back)

        x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        assert torch.equal(rows(x), (x.repeat_interleave(2, 0)) ** 3)
        assert torch.autograd.gradcheck(rows, x) and torch.autograd.gradgradcheck(rows, x)


def test_sums_of_tokens_are_derived_twice():
    """As torch's index, product and sum, with counts of another dtype too."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(0, 3, (5, 4), generator=generator)
    order, back, rows, _ = forward.ops.sort_by_expert(chosen, 3, False)
    y, counts = torch.randn(20, 6, generator=generator), torch.rand(5, 4, generator=generator)

    def plain(y, counts):
        return (y[back].view(5, 4, -1) * counts.unsqueeze(-1)).sum(1).to(y.dtype)

    for dtype in (torch.float32, torch.bfloat16):
        given = [(y.to(dtype).requires_grad_(), counts.clone().requires_grad_()) for _ in range(2)]
        found, expected = forward.SumByToken.apply(*given[0], order, back, rows), plain(*given[1])
        torch.testing.assert_close(found, expected)
        first, second = (
            torch.autograd.grad(out.float().pow(3).sum(), one, create_graph=True)
            for out, one in ((found, given[0]), (expected, given[1]))
        )
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b)
        if dtype is torch.float32:
            again = (
                torch.autograd.grad(g[0].sum() + g[1].square().sum(), one)
                for g, one in zip((first, second), given, strict=True)
            )
            for a, b in zip(*again, strict=True):
                torch.testing.assert_close(a, b)
