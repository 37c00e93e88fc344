"""Merge-aware adapters on stacks of experts: forward, gradient, merging and files have the same bytes."""

import copy

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from bitshard import fsdp, functional, lora  # noqa: E402
from bitshard.experts import adapted as adapted_module  # noqa: E402
from bitshard.experts import lora as product  # noqa: E402
from bitshard.functions.merge import merge_4bit  # noqa: E402
from bitshard.kinds import kind_of  # noqa: E402
from bitshard.lora.aware_stack import MergeAwareParamWrapper  # noqa: E402
from bitshard.lora.stack import Peft  # noqa: E402
from bitshard_cli.main import main  # noqa: E402
from helpers import moe  # noqa: E402
from helpers.bytes import same_bytes  # noqa: E402
from helpers.copies import pickled  # noqa: E402
from helpers.files import tensors  # noqa: E402

MODELS = [("qwen3_moe", "nf4"), ("gpt_oss", "nf4"), ("qwen3_moe", "mxfp4"), ("gpt_oss", "nvfp4")]


def wrappers(model):
    return [module for module in model.modules() if isinstance(module, Peft)]


def step(model, checkpointing=False):
    """Loss and gradients."""
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(input_ids=moe.TOKENS, labels=moe.TOKENS).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("quant_type", ["nf4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_product_and_gradients(quant_type, compute):
    """y by the merged codes of each expert; dx by them, too; dA and dB as of a dense W + s B A."""
    E, N, K, r, s = 3, 32, 64, 3, 1.5
    torch.manual_seed(2)
    settings = {"quant_type": "nf4", "compress_statistics": True} if quant_type == "nf4" else {}
    stack = kind_of(quant_type).stack.quantize(torch.randn(E, N, K), quant_storage=torch.uint8, **settings)
    A, B = (torch.randn(shape, requires_grad=True) for shape in ((E, r, K), (E, N, r)))
    x, offs = torch.randn(9, K).to(compute).requires_grad_(), torch.tensor([4, 4, 9], dtype=torch.int32)
    bias = torch.randn(E, N).to(compute).requires_grad_()
    y = product.merged_product(x, offs, *stack, bias, [(A, B, s)])
    merged = merge_4bit(*stack, [(A, B, s)])
    assert not same_bytes(merged[0], stack[0])
    assert torch.equal(y, functional.grouped_linear_4bit(x.detach(), offs, *merged, bias.detach()))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert torch.equal(x.grad, functional.grouped_linear_4bit_dgrad(dy, offs, *merged))
    bound = 1e-5 if compute is torch.float32 else 3e-2
    for expert, rows in enumerate((slice(0, 4), slice(4, 4), slice(4, 9))):
        dW = dy[rows].double().T @ x.detach()[rows].double()
        a, b = A.detach()[expert].double(), B.detach()[expert].double()
        wanted = ((A.grad[expert], s * b.T @ dW), (B.grad[expert], s * dW @ a.T), (bias.grad[expert], dy[rows].sum(0)))
        for found, exact in wanted:
            assert (found.double() - exact).norm() <= bound * exact.double().norm()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family, quant_type", MODELS)
def test_all_ways_of_merging_give_the_bytes_of_the_forward(tmp_path, family, quant_type):
    wrapped = moe.adapted_4bit(moe.blocks_fit(family, tmp_path / "model"), quant_type)
    plain = copy.deepcopy(wrapped)
    assert lora.merge_aware(wrapped) == 6
    logits = moe.logits(wrapped.eval())
    assert not torch.equal(moe.logits(plain.eval()), logits)
    wrapped.save_pretrained(tmp_path / "adapter")
    plain.unload().save_pretrained(tmp_path / "base")
    fsdp.save_pretrained(wrapped, tmp_path / "saved", merge=True)
    fsdp.save_pretrained(wrapped, tmp_path / "dense", merge=True, dtype=torch.float32)
    words = [str(tmp_path / name) for name in ("base", "adapter", "command")]
    assert main(["merge", *words, "--to", "4bit", "--merge-aware"]) == 0
    wrapped.merge_adapter()
    assert torch.equal(moe.logits(wrapped), logits)
    wrapped.unmerge_adapter()
    assert torch.equal(moe.logits(wrapped), logits)
    merged = wrapped.merge_and_unload()
    assert torch.equal(moe.logits(merged), logits) and not wrappers(merged)
    merged.save_pretrained(tmp_path / "unloaded")
    saved, *others = (tensors(tmp_path / name) for name in ("saved", "command", "unloaded"))
    stacks = [name for name in saved if "experts." in name and "quant_state." not in name]
    assert len(stacks) >= 8 and all(other.keys() == saved.keys() for other in others)
    for name in stacks:
        assert all(same_bytes(saved[name], other[name]) for other in others), name
    for name in ("saved", "command", "unloaded"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        assert torch.equal(moe.logits(loaded), logits), name
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert (moe.logits(dense) - logits).abs().max() <= 1e-4 * logits.abs().max()


@pytest.mark.parametrize("quant_type", ["nf4", "nvfp4"])
def test_recomputation_copies_and_off_again(tmp_path, quant_type):
    """Checkpointing changes no bit; copies and pickles multiply alike; off, the model is peft's again."""
    wrapped = moe.adapted_4bit(moe.blocks_fit("qwen3_moe", tmp_path), quant_type).train()
    before = step(wrapped)
    assert lora.merge_aware(wrapped) == 6
    with pytest.raises(ValueError, match="it is merge-aware"):
        lora.fuse(wrapped)
    expected = step(wrapped)
    assert not torch.equal(expected[0], before[0]) and adapted_module.of_call.get() == ()
    for other in (copy.deepcopy(wrapped), pickled(wrapped)):
        assert all(isinstance(each, MergeAwareParamWrapper) for each in wrappers(other))
        assert all(torch.equal(a, b) for a, b in zip(step(other), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(step(wrapped, True), expected, strict=True))
    assert lora.merge_aware(wrapped, None) == 6 and {type(each) for each in wrappers(wrapped)} == {Peft}
    assert all(torch.equal(a, b) for a, b in zip(step(wrapped), before, strict=True))


def test_several_adapters(tmp_path):
    """By name, whatever the order in which they are active: float32 scales show the order."""
    wrapped = moe.adapted_4bit(moe.blocks_fit("qwen3_moe", tmp_path), "fp4").eval()
    wrapped.add_adapter("another", wrapped.peft_config["default"])
    for name, parameter in wrapped.named_parameters():
        if ".another." in name:
            parameter.data.normal_(0, 0.05)
    lora.merge_aware(wrapped)
    found = []
    for names in (["default", "another"], ["another", "default"], ["default"]):
        wrapped.base_model.set_adapter(names)
        found.append(moe.logits(wrapped))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    wrapped.base_model.set_adapter(["default", "another"])
    assert torch.equal(moe.logits(wrapped.merge_and_unload()), found[0])


def test_what_is_refused(tmp_path):
    stack = functional.quantize_experts_4bit(torch.randn(2, 8, 64), quant_type="nf4")
    A, B = torch.ones(2, 3, 64), torch.ones(2, 8, 3)
    for a, b in ((A[:1], B), (A, B[:, :7]), (A[0], B[0])):
        with pytest.raises(ValueError, match=r"the stack is \[2, 8, 64\]"):
            merge_4bit(*stack, [(a, b, 1.0)])
    wrapped = moe.adapted_4bit(moe.blocks_fit("qwen3_moe", tmp_path), "nf4")
    lora.merge_aware(wrapped)
    layer = wrappers(wrapped)[0]
    with pytest.raises(ValueError, match="takes no adapter_names"):
        layer(torch.randn(1, 64), adapter_names=["default"])
    wrapped.to(torch.bfloat16)
    with pytest.raises(ValueError, match="was float32 when .* and is bfloat16 in the forward"):
        moe.logits(wrapped)
