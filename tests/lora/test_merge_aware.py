"""Merge-aware LoRA layers: forward, recomputation, gradient, merging and files have the same bytes."""

import contextlib
import copy
import logging
import re
from pathlib import Path

import bitshard
import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from bitshard import fsdp, functional, graphs, lora  # noqa: E402
from bitshard.functions import merge_again  # noqa: E402
from bitshard.functions.merge import merge_4bit  # noqa: E402
from bitshard.graphs import enabled  # noqa: E402
from bitshard.lora import aware  # noqa: E402
from bitshard_cli.main import main  # noqa: E402
from helpers import switches  # noqa: E402
from helpers.copies import pickled, saved  # noqa: E402
from helpers.graphs import StandIn  # noqa: E402
from helpers.llama import TOKENS, load_4bit  # noqa: E402
from helpers.lora import layers, model, randomize  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

LINEARS = 7  # of the decoder layer of helpers/llama.py


@contextlib.contextmanager
def merged_weights():
    """What `merge_4bit` gives each call of a layer meanwhile."""
    made, call = [], merge_again.merge_4bit
    merge_again.merge_4bit = lambda *args: made.append(call(*args)) or made[-1]
    try:
        yield made
    finally:
        merge_again.merge_4bit = call


def test_what_recomputation_keeps_is_no_more_than_a_largest_weight():
    """Beside the newest; and nothing of a backward that has raised, nor where nothing is computed again."""
    sizes, at_most, kept = (5, 2, 2, 4, 9, 3, 9), 9, merge_again._Kept()

    def made(size):
        return torch.empty(size, dtype=torch.uint8), bitshard.functional.QuantState(torch.empty(0))

    for number, size in enumerate(sizes):
        kept.put((number,), made(size), torch.empty(0))
        held = [packed.nbytes for (packed, _), _ in kept.of.values()]
        assert held[-1] == size and sum(held[:-1]) <= at_most
    assert list(kept.of) == [(1,), (2,), (5,), (6,)]

    def fails(x):
        kept.begin(torch._C._current_graph_task_id())
        kept.put((0,), made(5), x)
        raise RuntimeError("in the middle")

    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        y = checkpoint(lambda x: x * 2 if torch._C._current_graph_task_id() < 0 else fails(x), x, use_reentrant=True)
        with pytest.raises(RuntimeError, match="in the middle"):
            y.sum().backward()
        assert list(kept.of) == [(0,)]  # of this backward alone
        kept.put((7,), made(1), x)


def test_what_is_kept_is_of_its_layer():
    """FSDP gathers the next layer's weight into the memory of the last one's: what is kept of x is for x alone."""
    packed, state = functional.quantize_4bit(torch.randn(8, 64), quant_type="nf4")
    adapters = [(torch.randn(2, 64), torch.randn(8, 2), 1.0)]
    found, x, other = [], torch.randn(3, 64), torch.randn(3, 64)

    def backward(dy):
        merge_again.for_forward(x, packed, state, adapters)
        packed.bitwise_not_()
        found.extend(merge_again.for_gradient(given, packed, state, adapters)[0] for given in (other, x, x))

    y = torch.ones(1, requires_grad=True)
    y.register_hook(backward)
    y.sum().backward()
    second, first, third = found
    assert torch.equal(second, merge_4bit(packed, state, adapters)[0]) and torch.equal(second, third)
    assert torch.equal(first, merge_4bit(~packed, state, adapters)[0]) and not torch.equal(first, second)


def bytes_of(made):
    packed, state = made
    second = [] if state.state2 is None else [state.state2.absmax, state.offset]
    return [packed.view(torch.uint8), state.absmax, *second]


def same(one, other):
    for a, b in zip(bytes_of(one), bytes_of(other), strict=True):
        assert torch.equal(a, b)


def adapted(folder, start_step=0, quant_type="nf4", **options):
    transformers.set_seed(3)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    found = peft.get_peft_model(load_4bit(folder, quant_type), peft.LoraConfig(**options)).train()
    if start_step is not None:
        assert lora.merge_aware(found, start_step) == LINEARS
    return found


def tokens(rows=2, length=12):
    return torch.randint(0, TOKENS, (rows, length), generator=torch.Generator().manual_seed(1))


def trained(wrapped, steps=3):
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 0.02)
    for _ in range(steps):
        wrapped(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return wrapped


def of_files(folder):
    """Packed bytes and scales of a saved model."""
    from safetensors.torch import load_file

    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return {name: tensor for name, tensor in found.items() if "proj" in name}


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_output_and_gradients(compute):
    """y by the merged codes; dx by them, too; dA and dB as of a dense W + s B A."""
    wrapped = model(compute=compute, adapter=compute)
    (layer,) = layers(wrapped)
    lora.merge_aware(wrapped)
    A, B, s = layer.lora_A.default.weight, layer.lora_B.default.weight, layer.scaling["default"]
    base = layer.base_layer
    codes, state = merge_4bit(base.weight.data, base.weight.quant_state, [(A, B, s)])
    x = torch.randn(5, 128).to(compute).requires_grad_()
    y = wrapped(x)
    assert torch.equal(y, functional.linear_4bit(x.detach(), codes, state, base.bias.to(compute)))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert torch.equal(x.grad, functional.linear_4bit_dgrad(dy, codes, state))
    dW = dy.double().T @ x.detach().double()
    bound = 1e-5 if compute is torch.float32 else 2e-2
    for found, exact in ((A.grad, s * B.double().T @ dW), (B.grad, s * dW @ A.double().T)):
        assert (found.double() - exact).norm() <= bound * exact.norm()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "mxfp4", "nvfp4"])
def test_forward_recomputation_and_backward_have_the_same_bytes(folder, quant_type, reentrant):
    """The smaller weights and the last one are kept from the recomputation for the gradient; others are made again."""
    wrapped = adapted(folder, quant_type=quant_type)
    randomize(wrapped)
    plain = copy.deepcopy(wrapped)
    wrapped.gradient_checkpointing_enable({"use_reentrant": reentrant})
    wrapped.enable_input_require_grads()
    plain.enable_input_require_grads()
    with merged_weights() as made:
        loss = wrapped(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
    assert not merge_again._kept.of
    forward, again, back = made[:LINEARS], made[LINEARS : 2 * LINEARS], made[2 * LINEARS :]
    for one, other in zip(forward, again, strict=True):
        same(one, other)
    for number, other in zip((0, 4, 5), reversed(back), strict=True):
        same(forward[number], other)
    other = plain(input_ids=tokens(), labels=tokens()).loss
    other.backward()
    assert torch.equal(loss, other)
    for a, b in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert a.grad is None and b.grad is None if not a.requires_grad else torch.equal(a.grad, b.grad)


def test_reentrant_checkpointing():
    wrapped = model()
    lora.merge_aware(wrapped)
    x = torch.randn(4, 128, requires_grad=True)
    checkpoint(wrapped, x, use_reentrant=True).sum().backward()
    (layer,) = layers(wrapped)
    grads = x.grad, layer.lora_A.default.weight.grad, layer.lora_B.default.weight.grad
    x.grad = None
    wrapped.zero_grad()
    wrapped(x).sum().backward()
    for a, b in zip(grads, (x.grad, layer.lora_A.default.weight.grad, layer.lora_B.default.weight.grad), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quant_type, rslora", [("nf4", False), ("nf4", True), ("mxfp4", False), ("nvfp4", False)])
def test_all_ways_of_merging_give_the_bytes_of_the_forward(folder, tmp_path, quant_type, rslora):
    """`merge_and_unload`, `save_pretrained(merge=True)` and the command: the forward's bytes, and bit-equal logits."""
    wrapped = trained(adapted(folder, quant_type=quant_type, use_rslora=rslora)).eval()
    with merged_weights() as made, torch.no_grad():
        logits = wrapped(input_ids=tokens()).logits
    before = [layer.base_layer.weight.data.clone() for layer in layers(wrapped)]
    assert sum(not torch.equal(codes, old) for (codes, _), old in zip(made, before, strict=True)) == LINEARS
    wrapped.save_pretrained(tmp_path / "adapter")
    load_4bit(folder, quant_type).save_pretrained(tmp_path / "base")
    fsdp.save_pretrained(wrapped, tmp_path / "saved", merge=True)
    arguments = [str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "command"), "--to", quant_type]
    assert main(["merge", *arguments, "--merge-aware"]) == 0
    merged = wrapped.merge_and_unload()
    merged.save_pretrained(tmp_path / "unloaded")
    files = [of_files(tmp_path / name) for name in ("saved", "command", "unloaded")]
    of_forward = [codes.view(torch.uint8).flatten() for codes, _ in made]
    written = [tensor.flatten() for name, tensor in files[0].items() if name.endswith("proj.weight")]
    assert all(any(torch.equal(codes, one) for one in written) for codes in of_forward)
    assert len(files[0]) > LINEARS and all(one.keys() == files[0].keys() for one in files)
    for name, tensor in files[0].items():
        if "quant_state." in name:
            continue
        assert all(torch.equal(tensor.view(torch.uint8), one[name].view(torch.uint8)) for one in files[1:]), name
    assert torch.equal(merged(input_ids=tokens()).logits, logits)
    for name in ("saved", "command", "unloaded"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, device_map={"": "cpu"})
        assert torch.equal(loaded(input_ids=tokens()).logits, logits), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quant_type", ["mxfp4", "nvfp4"])
def test_an_adapter_that_is_not_finite_is_not_merged(folder, tmp_path, quant_type):
    """Its scales would be no numbers, which no reader takes; the model stays as it is."""
    wrapped = adapted(folder, quant_type=quant_type).eval()
    layer = layers(wrapped)[0]
    with torch.no_grad():
        layer.lora_A.default.weight[0, 5], layer.lora_B.default.weight[3] = 3e38, 3e38
    before = layer.base_layer.weight.data.clone()
    with pytest.raises(ValueError, match=r"W \+ s B A is not finite"):
        wrapped.merge_adapter()
    assert torch.equal(layer.base_layer.weight.data, before) and layer.merged_adapters == []
    with pytest.raises(ValueError, match=r"W \+ s B A is not finite"):
        fsdp.save_pretrained(wrapped, tmp_path / "out", merge=True)
    wrapped.save_pretrained(tmp_path / "adapter")
    load_4bit(folder, quant_type).save_pretrained(tmp_path / "base")
    words = ["merge", *(str(tmp_path / name) for name in ("base", "adapter", "new")), "--to", "4bit", "--merge-aware"]
    assert main(words) == 1


@pytest.mark.filterwarnings("ignore")
def test_dense_values_are_those_of_the_merged_codes(folder, tmp_path):
    wrapped = trained(adapted(folder)).eval()
    logits = wrapped(input_ids=tokens()).logits
    fsdp.save_pretrained(wrapped, tmp_path / "dense", merge=True, dtype=torch.float32)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert (loaded(input_ids=tokens()).logits - logits).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.filterwarnings("ignore")
def test_several_adapters_and_unmerging():
    """The sum in the order of names, whatever the order in which they are active; unmerging gives the weight back."""
    wrapped = model()
    wrapped.add_adapter("another", peft.LoraConfig(r=3, lora_alpha=6, target_modules=["0"]))
    randomize(wrapped)
    (layer,) = layers(wrapped)
    wrapped.base_model.set_adapter(["default", "another"])
    lora.merge_aware(wrapped)
    x = torch.randn(3, 128)
    with merged_weights() as made:
        y = wrapped(x)
    weight = layer.base_layer.weight
    before = weight.data.clone(), weight.quant_state.absmax.clone()
    pairs = [(layer.lora_A[n].weight, layer.lora_B[n].weight, layer.scaling[n]) for n in ("another", "default")]
    same(made[0], merge_4bit(weight.data, weight.quant_state, pairs))
    wrapped.merge_adapter()
    assert sorted(layer.merged_adapters) == ["another", "default"]
    same(made[0], (layer.base_layer.weight.data, layer.base_layer.weight.quant_state))
    assert torch.equal(wrapped(x), y)
    wrapped.unmerge_adapter()
    weight = layer.base_layer.weight
    assert torch.equal(weight.data, before[0]) and torch.equal(weight.quant_state.absmax, before[1])
    assert torch.equal(wrapped(x), y) and layer.merged_adapters == []
    wrapped.merge_adapter(["another"])
    with pytest.raises(ValueError, match=r"\['another'\] are in it, and merge-aware layers merge all adapters at once"):
        wrapped.merge_adapter(["default"])
    wrapped.unmerge_adapter()
    wrapped.base_model.disable_adapter_layers()
    assert torch.equal(wrapped(x), layer.base_layer(x))


def test_start_step(folder):
    """Ordinary steps first; then those of a run that is merge-aware from the start, with that optimizer."""
    wrapped, plain = adapted(folder, 2), adapted(folder, None)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    for _ in range(3):
        other.step()  # not of this model
    trained(wrapped, 2), trained(plain, 2)
    for a, b in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    with merged_weights() as made:
        wrapped(input_ids=tokens())
    assert len(made) == LINEARS
    assert lora.merge_aware(plain) == LINEARS
    trained(wrapped, 1), trained(plain, 1)
    for a, b in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_off_again_and_fused(folder):
    wrapped = adapted(folder, None)
    expected = wrapped(input_ids=tokens()).logits
    lora.fuse(wrapped)
    assert lora.merge_aware(wrapped, 1) == LINEARS and lora.merge_aware(wrapped, None) == 0
    assert lora.merge_aware(wrapped) == LINEARS
    with pytest.raises(ValueError, match="it is merge-aware"):
        lora.fuse(wrapped)
    assert lora.merge_aware(wrapped, None) == LINEARS
    assert torch.equal(wrapped(input_ids=tokens()).logits, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_copies(copied):
    wrapped = model()
    lora.merge_aware(wrapped)
    x = torch.randn(3, 128)
    other = copied(wrapped)
    assert torch.equal(other(x), wrapped(x)) and isinstance(layers(other)[0], aware.MergeAwareLinear4bit)


def test_by_the_switch(folder, caplog):
    wrapped = adapted(folder, None)
    with switches.set_to(MERGE_AWARE="1"), caplog.at_level(logging.INFO, "bitshard"):
        wrapped.train()
    assert f"BITSHARD_MERGE_AWARE=1: {LINEARS} LoRA layers train on the weights that merging will give" in caplog.text
    assert all(isinstance(layer, aware.MergeAwareLinear4bit) for layer in layers(wrapped))
    refused = adapted(folder, None, use_dora=True)
    with switches.set_to(MERGE_AWARE="1"), caplog.at_level(logging.INFO, "bitshard"):
        refused.train()
    assert "does NOT train merge-aware" in caplog.text


@pytest.mark.parametrize("quant_type", ["nf4", "nvfp4"])
def test_graphs(folder, monkeypatch, quant_type):
    """A recorded step has the losses and adapters of the step as it is; a switch at start_step drops it."""
    monkeypatch.setattr(enabled, "RECORDER", StandIn)
    plain, recorded = (adapted(folder, 3, quant_type) for _ in range(2))
    graphs.enable(recorded)
    trained(plain, 8), trained(recorded, 8)
    assert graphs.report(recorded).replays >= 2
    for a, b in zip(plain.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(a, b)


REFUSED = [
    ({"use_dora": True}, "Dora scales or selects rows"),
    ({"lora_bias": True}, r"it has a bias \(lora_bias=True\)"),
    ({"lora_dropout": 0.1}, "it has lora_dropout=0.1, and a merged weight has none"),
]


@pytest.mark.parametrize("options, words", REFUSED)
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=f"bitshard.lora.merge_aware: .*, adapter 'default': {words}"):
        lora.merge_aware(model(**options).train())


def test_other_models_and_arguments():
    with pytest.raises(ValueError, match="expected Linear4bit layers|this one is"):
        lora.merge_aware(model(threshold=6.0))
    with pytest.raises(ValueError, match="has no LoRA layers"):
        lora.merge_aware(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="start_step is -1"):
        lora.merge_aware(model(), -1)
    dense = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), peft.LoraConfig(target_modules=["0"]))
    with pytest.raises(ValueError, match="none of the 1 LoRA layers"):
        lora.merge_aware(dense)
    wrapped = model()
    lora.merge_aware(wrapped)
    with pytest.raises(ValueError, match=r"takes x alone, not \['adapter_names'\]"):
        layers(wrapped)[0](torch.randn(1, 128), adapter_names=["default"])
    wrapped.to(torch.bfloat16)
    with pytest.raises(ValueError, match="was float32 when .* and is bfloat16 in the forward"):
        wrapped(torch.randn(1, 128))
    lora.merge_aware(wrapped)
    wrapped(torch.randn(1, 128))
    hook = layers(wrapped)[0].lora_A.default.register_forward_hook(lambda *a: None)
    with pytest.raises(ValueError, match="has hooks or another forward"):
        wrapped(torch.randn(1, 128))
    hook.remove()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        x = torch.randn(1, 128, requires_grad=True)
        torch.autograd.grad(wrapped(x).sum(), x, create_graph=True)


def test_the_command_wants_4_bits(tmp_path, capsys):
    assert main(["merge", "a", "b", str(tmp_path / "c"), "--merge-aware"]) == 2
    assert "--merge-aware is for --to 4bit or a format of 4 bits, not bfloat16" in capsys.readouterr().err


def test_the_lines_of_the_page(folder):
    """docs/merging.md, as it stands there."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "merging.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = {"bitshard": bitshard, "get_peft_model": peft.get_peft_model, "LoraConfig": peft.LoraConfig}
    exec(block, found | (given := {"model": load_4bit(folder)}), given)
    assert sum(isinstance(layer, aware.MergeAwareLinear4bit) for layer in layers(given["model"])) == LINEARS
