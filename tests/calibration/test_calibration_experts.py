"""bitshard.calibration: moments, and mixtures, each expert for the tokens that its router sends it."""

import pytest
import torch
from bitshard.calibration import calibrate_folder, layers, solve
from bitshard.calibration.moments import Moments, Sum
from bitshard.convert.quantize import quantize_folder
from bitshard.experts.modules import is_experts
from helpers import moe
from peft import PeftModel
from safetensors.torch import load_file
from test_calibration import IDS, TUNED_ON, config, distance, held_back, logits
from transformers import AutoModelForCausalLM


def test_moments_are_those_of_the_inputs():
    torch.manual_seed(0)
    layer = torch.nn.Module()
    layer.a, layer.b, layer.c = (torch.nn.Linear(8, 8) for _ in range(3))
    layer.forward = lambda x: layer.c(layer.a(x) + layer.b(x))
    moments, x = Moments(layer, ["a", "b", "c"]), torch.randn(4, 5, 8)
    with moments.watching(), torch.no_grad():
        for part in x:
            layer(part)
    rows = x.view(-1, 8)
    assert torch.allclose(moments.of("a"), rows.t() @ rows / 20, atol=1e-5)
    assert moments.leader("b") == "a" and moments.leader("c") == "c" and moments.rows("b") == 20
    inner = (layer.a(rows) + layer.b(rows)).detach()
    assert torch.allclose(moments.of("c"), inner.t() @ inner / 20, atol=1e-5)
    layer(x)  # nobody watches any more
    assert moments.rows("a") == 20


def test_few_tokens_are_shrunk_towards_the_layers():
    """An expert that no token reaches has the layer's moments, one with K rows half of its own."""
    moments = Moments(torch.nn.Module(), [])
    moments._experts["e"] = sums = [Sum(), Sum(), Sum()]
    for expert, x in ((0, torch.eye(4)), (2, torch.eye(4)), (2, 3 * torch.eye(4))):
        sums[expert].add(x)
    assert moments.of_expert("e", 1)[1] == 0 and torch.allclose(moments.of_expert("e", 1)[0], sums[2].mean())
    own, rows = moments.of_expert("e", 0)
    assert rows == 4 and torch.allclose(own, (torch.eye(4) / 4 + sums[2].mean()) / 2)


@pytest.mark.parametrize("family", moe.FAMILIES)
def test_mixtures(tmp_path, family):
    """Experts each for its own tokens; bitshard reads the folder, and it is nearer to the dense model."""
    moe.model(family, 4, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    settings = config(True, bnb_4bit_use_double_quant=True)
    said = calibrate_folder(tmp_path / "dense", tmp_path / "out", settings, IDS)
    assert all(each.error < each.plain for each in said.layers if each.methods)
    wanted = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32))
    quantize_folder(tmp_path / "dense", tmp_path / "plain", settings)
    found = {name: distance(AutoModelForCausalLM.from_pretrained(tmp_path / name), wanted) for name in ("out", "plain")}
    assert found["out"] < found["plain"]


def more_than_the_best(left, product, H, rank):
    """What `product` leaves of `left` under H beyond what the best matrix of this rank leaves, as a share of all."""
    root = torch.linalg.cholesky(H + 1e-4 * H.diagonal().mean() * torch.eye(len(H)))
    values = torch.linalg.svdvals(left @ root).square()
    return (((left - product) @ root).square().sum() - values[rank:].sum()).item() / values.sum().item()


@pytest.mark.parametrize("family", moe.FAMILIES)
@pytest.mark.parametrize("rank, steps", [(4, 0), (60, 2)])
def test_corrections_of_experts(tmp_path, family, rank, steps, monkeypatch):
    """peft loads what is the best of its rank for each expert's own moments, which the next layers are calibrated with;
    a rank above a matrix's own is filled up with zeros. Tuning trains them further."""
    adapter, moments = tmp_path / "adapter", []

    class Inputs(solve.Inputs):
        def __init__(self, H):
            super().__init__(H)
            moments.append(self.H.double())

    monkeypatch.setattr(layers, "Inputs", Inputs)
    moe.model(family, 4, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    given = {"adapter": adapter, "rank": rank, "tune_steps": steps}
    said = calibrate_folder(tmp_path / "dense", tmp_path / "out", config(True), TUNED_ON[:8], **given)
    uncorrected = [remark for remark in said.layers[0].remarks if "no correction" in remark]
    assert bool(uncorrected) == (family == "deepseek_v3")  # its first MLP is dense
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.nn.Module.float(model)
    near = moe.decoded(dense, model)
    model = PeftModel.from_pretrained(model, adapter)
    loaded, stored = dict(model.named_parameters()), load_file(adapter / "adapter_model.safetensors")
    assert len(stored) == sum(".lora_" in key for key in loaded)
    for key, factor in stored.items():
        assert torch.equal(loaded[key.replace(".weight", ".default.weight")].cpu(), factor), key
    wrappers = [(name, module) for name, module in model.named_modules() if hasattr(module, "parameter_name")]
    assert len(wrappers) == 2 * sum(map(is_experts, dense.modules()))
    if steps:
        assert said.tuned.steps == steps
        return
    for name, wrapper in wrappers:
        path = name.removeprefix("base_model.model.").replace(".base_layer", "")
        ours, theirs = (each.get_submodule(path) for each in (near, dense))
        left = getattr(theirs, wrapper.parameter_name) - getattr(ours, wrapper.parameter_name)
        both = torch.stack([left.detach(), wrapper.get_delta_weight("default").detach().cpu()], 1).double()
        for left, product in both.transpose(2, 3) if ours.is_transposed else both:
            more = [more_than_the_best(left, product, H, rank) for H in moments if len(H) == left.shape[1]]
            assert min(more) < 1e-3, (name, wrapper.parameter_name)


@pytest.mark.parametrize("family", moe.FAMILIES)
def test_tuned_mixtures(tmp_path, family):
    """Scales of experts, too, of stacks that are stored either way round."""
    moe.model(family, 4, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    said = calibrate_folder(tmp_path / "dense", tmp_path / "out", config(True), TUNED_ON, tune_steps=4).tuned
    assert said.kept or family == "nemotron_h"  # in which a few tokens are then sent to other experts
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.nn.Module.float(model)
    assert abs(held_back(model, dense) / (said.after if said.kept else said.before) - 1) < 0.05
