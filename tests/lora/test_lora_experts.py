"""`bitshard.lora.fuse` on stacks of experts: the bits of peft's way, and every way back to it."""

import concurrent.futures
import copy
import threading
from pathlib import Path

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from bitshard import experts, lora  # noqa: E402
from bitshard.autograd import grouped_matmul_4bit  # noqa: E402
from bitshard.experts import adapted as adapted_module  # noqa: E402
from bitshard.experts import lora as product  # noqa: E402
from bitshard.experts.adapted import LowRank  # noqa: E402
from bitshard.functional import quantize_experts_4bit  # noqa: E402
from bitshard.lora import stack  # noqa: E402
from bitshard.lora.stack import FusedParamWrapper, Peft  # noqa: E402
from helpers import moe  # noqa: E402
from helpers.bytes import same_bytes  # noqa: E402
from helpers.copies import pickled  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
VIEWS = """view t transpose permute slice select expand detach alias _unsafe_view unsqueeze squeeze as_strided split
split_with_sizes unbind _reshape_alias chunk narrow empty empty_like new_empty
empty_strided new_empty_strided""".split()


class Launches(TorchDispatchMode):
    """Counts calls of ops that compute or copy: on a GPU each is at least one launch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] not in VIEWS:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def adapted(family="qwen3_moe", dtype=torch.float32, r=8, targets=("q_proj",), **settings):
    model = moe.model(family, dtype=dtype)
    experts.quantize(model)
    settings = {"r": r, "target_modules": list(targets), "target_parameters": TARGETS, "lora_alpha": 12} | settings
    model = peft.get_peft_model(model, peft.LoraConfig(**settings, task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.05)
    return model.train()


def wrappers(model):
    return [module for module in model.modules() if isinstance(module, Peft)]


def step(model, checkpointing=False):
    """Loss and gradients."""
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss = model(input_ids=moe.TOKENS, labels=moe.TOKENS).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


def equal(found, expected):
    return len(found) == len(expected) > 1 and all(same_bytes(*pair) for pair in zip(found, expected, strict=True))


@pytest.fixture
def calls(monkeypatch):
    """What `_activate_lora` of peft was called with: the forwards that went its way."""
    made, real = [], Peft._activate_lora

    def counted(self, names):
        made.append(names)
        return real(self, names)

    monkeypatch.setattr(Peft, "_activate_lora", counted)
    monkeypatch.setattr(stack, "ACTIVATE", counted)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family, r", [("qwen3_moe", 8), ("gpt_oss", 8), ("qwen3_moe", 3)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_bits_are_those_of_pefts_way(calls, family, r, dtype, checkpointing):
    model = adapted(family, dtype, r, use_rslora=r == 3)
    expected = step(model, checkpointing)
    assert len(calls) == 4 * (1 + checkpointing) and all(g.abs().max() > 0 for g in expected)
    report = lora.fuse(model)
    fused = len(wrappers(model))
    assert fused == 4 and len([name for name in report.fused if "experts" in name]) == 4, report
    del calls[:]
    assert equal(step(model, checkpointing), expected) and not calls
    assert adapted_module.of_call.get() == ()
    assert lora.unfuse(model) == fused and {type(each) for each in wrappers(model)} == {Peft}
    assert equal(step(model, checkpointing), expected) and calls


def stacks(model):
    return [(m, held) for m in model.modules() for held in vars(m).get("packed_stacks", {}).values()]


def test_launches_of_a_layer():
    """Of the routed part of one layer, bf16 adapters: the numbers that docs/lora.md gives."""
    model, counts = adapted("qwen3_moe", torch.bfloat16), []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    layer = next(each for each in model.modules() if hasattr(each, "experts"))
    for _ in range(2):
        x = torch.randn(1, 24, 64, dtype=torch.bfloat16, requires_grad=True)
        with Launches() as forward:
            y = layer(x)
        with Launches() as backward:
            y.backward(torch.ones_like(y))
        counts.append(len(forward.names) + len(backward.names))
        layer.zero_grad()
        lora.fuse(model)
    page = (Path(__file__).parents[2] / "docs/lora.md").read_text()
    assert counts[1] < counts[0] and f"{counts[0]} calls that compute or copy before, {counts[1]} after" in page, counts


def loss(model):
    return model(input_ids=moe.TOKENS, labels=moe.TOKENS).loss.detach()


def test_ways_back_to_peft(calls, monkeypatch, tmp_path):
    model = adapted(targets=())
    model.save_pretrained(tmp_path)
    lora.fuse(model)

    def peft_does(why, times=4):
        """The next forward is peft's, with the loss that peft's own wrappers give."""
        del calls[:]
        mine = loss(model)
        assert len(calls) == times, why
        found = set(lora.report(model).left.values())
        assert found == {why}, found
        lora.unfuse(model)
        assert same_bytes(mine, loss(model))
        lora.fuse(model)

    assert not lora.report(model).left and loss(model) and not calls
    with model.disable_adapter():
        peft_does("its adapters are disabled", 0)
    model.load_adapter(tmp_path, "again")
    model.base_model.set_adapter(["default", "again"])
    peft_does("2 adapters are active")
    model.base_model.set_adapter("default")
    model.delete_adapter("again")
    for wrapper in wrappers(model):
        wrapper.lora_B["default"].half()
    assert set(lora.report(model).left.values()) == {"A is float32 and B float16"}
    for wrapper in wrappers(model):
        wrapper.lora_B["default"].float()
    model.merge_adapter()
    peft_does("its adapter is merged", 0)
    model.unmerge_adapter()
    assert not lora.report(model).left
    monkeypatch.setattr(Peft, "_activate_lora", lambda self, names, real=Peft._activate_lora: real(self, names))
    peft_does("the forward of ParamWrapper has been replaced")


def test_an_error_leaves_nothing_behind():
    model = adapted(targets=())
    lora.fuse(model)
    expected = loss(model)
    held = stacks(model)[1][1]
    held.compute_dtype = torch.int32
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        loss(model)
    held.compute_dtype = None
    assert adapted_module.of_call.get() == () and same_bytes(loss(model), expected)


def in_threads(calls):
    """What each of `calls` gives, all of them at once, in threads of their own."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        start = threading.Barrier(len(calls))
        return list(pool.map(lambda call: (start.wait(), call())[1], calls))


def test_forwards_in_threads_are_those_of_one():
    """A forward's adapter is that forward's: other threads neither see it nor leave theirs."""
    model = adapted(targets=()).eval()
    lora.fuse(model)
    inputs = [torch.randint(0, 32, (1, 8 + i), generator=torch.Generator().manual_seed(i)) for i in range(3)]

    @torch.no_grad()
    def logits(ids):
        return model(input_ids=ids).logits

    expected = [logits(ids) for ids in inputs]
    found = in_threads([lambda ids=ids: [logits(ids) for _ in range(15)] for ids in inputs])
    wrong = sum(not same_bytes(y, other) for ys, other in zip(found, expected, strict=True) for y in ys)
    assert wrong == 0 and all(same_bytes(logits(ids), other) for ids, other in zip(inputs, expected, strict=True))


def test_a_copy_made_in_a_forward_has_no_adapter_of_it():
    model, copies = adapted(targets=()), []
    lora.fuse(model)
    expected = loss(model)
    with model.disable_adapter():
        base = loss(model)
    module = stacks(model)[0][0]
    handle = module.register_forward_pre_hook(lambda *_: copies.append(copy.deepcopy(model)) if not copies else None)
    assert same_bytes(loss(model), expected) and len(copies) == 1
    handle.remove()
    assert same_bytes(loss(copies[0]), expected)
    with copies[0].disable_adapter():
        assert same_bytes(loss(copies[0]), base)


def test_dense_experts_are_left_to_peft():
    dense = moe.model("qwen3_moe")
    dense = peft.get_peft_model(dense, peft.LoraConfig(r=2, target_parameters=TARGETS))
    with pytest.raises(ValueError, match="its parameter is not 4-bit"):
        lora.fuse(dense)


def test_copies_and_pickles_of_fused_wrappers():
    model = adapted(targets=())
    assert len(lora.fuse(model).fused) == 4
    expected = loss(model)
    for other in (copy.deepcopy(model), pickled(model)):
        assert [type(each) for each in wrappers(other)] == [FusedParamWrapper] * 4
        assert same_bytes(loss(other), expected) and lora.unfuse(other) == 4
    assert repr(model) == repr(copy.deepcopy(model)) and "lora.ParamWrapper(" in repr(model)


# ---- the product ----


def operands(S, N=24, K=32, E=5, r=3):
    torch.manual_seed(S + N)
    packed, state = quantize_experts_4bit(torch.randn(E, N, K), 64)
    offs = torch.tensor([0, S // 3, S // 2, S // 2, S], dtype=torch.int32)
    x, A, B = torch.randn(S, K), torch.randn(E, r, K), torch.randn(N, r, E).permute(2, 0, 1)
    return packed, state, offs, [value.requires_grad_() for value in (x, A, B)]


def composed(x, A, B, packed, state, offs, scale):
    y = grouped_matmul_4bit(x, offs, packed, state, None)
    return y + LowRank(B, A, scale).product(x, offs, False)


@pytest.mark.parametrize("S", [0, 1, 37])
def test_gradients_and_second_derivatives(S):
    packed, state, offs, inputs = operands(S)
    found = []
    for way in (lambda x, A, B: product.product(x, offs, packed, state, None, A, B, 1.5),
                lambda x, A, B: composed(x, A, B, packed, state, offs, 1.5)):  # fmt: skip
        y = way(*inputs)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
        plain = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        first = torch.autograd.grad(y, inputs, dy, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [dy, *inputs])
        found.append([y.detach(), *plain, *(g.detach() for g in first), *second])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-4, atol=2e-3)


def test_rows_that_are_no_whole_16_bytes_go_one_by_one():
    assert product.fits(LowRank(torch.zeros(2, 8, 3), torch.zeros(2, 3, 16), 1.0), torch.zeros(1, 16), None)
    assert not product.fits(LowRank(torch.zeros(2, 6, 3), torch.zeros(2, 3, 16), 1.0), torch.zeros(1, 16), None)
    assert not product.fits(LowRank(torch.zeros(2, 8, 3), torch.zeros(2, 3, 12), 1.0), torch.zeros(1, 12).half(), None)
    bias = torch.zeros(2, 8, requires_grad=True)
    assert not product.fits(LowRank(torch.zeros(2, 8, 3), torch.zeros(2, 3, 16), 1.0), torch.zeros(1, 16), bias)
