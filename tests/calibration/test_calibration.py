"""bitshard.calibration: scales and codes for inputs, layer by layer, in the format that everybody reads."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import reference
import torch
from bitshard import functional, lora
from bitshard.calibration import calibrate, calibrate_folder, layers, low_rank, samples, solve, stored, tuning
from bitshard.calibration import folder as folders
from bitshard.calibration.decoder import Decoder
from bitshard.calibration.moments import Moments
from bitshard.convert import output
from bitshard.convert.quantize import quantize_folder
from bitshard.experts.modules import is_experts
from bitshard.transformers import FourBitConfig
from bitshard_cli import main
from fsdp.launch import launch
from helpers import moe, upstream
from helpers.alike import agree, by_isa
from helpers.files import same, tensors
from helpers.tiny import llama
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    T5Config,
    T5Model,
)

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))
import tiny  # noqa: E402

FORMATS = [solve.Format(), solve.Format("fp4"), solve.Format(nested=True), solve.Format("nf4", 32, True)]
FORMATS += [solve.Format("nf4", 128), solve.Format("fp4", 4096, True)]
MICROSCALED = [solve.Format("mxfp4", 32), solve.Format("nvfp4", 16)]
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
IDS = torch.randint(0, 96, (6, 32), generator=torch.Generator().manual_seed(1))


def config(experts=False, **options):
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32, **options}
    return FourBitConfig(**options) if experts else BitsAndBytesConfig(load_in_4bit=True, **options)


def problem(N=48, K=96, rows=400):
    """A matrix, and inputs some of whose columns are much larger and depend on others."""
    generator = torch.Generator().manual_seed(N * K)
    x = torch.randn(rows, K, generator=generator) @ torch.randn(K, K, generator=generator) / K**0.5
    x = x * torch.rand(K, generator=generator).pow(3) * 5
    return torch.randn(N, K, generator=generator) * 0.05, x.t() @ x / rows


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A folder with a model of three layers in bfloat16, in two files."""
    folder = tmp_path_factory.mktemp("dense") / "model"
    llama(folder, torch.bfloat16, shard="100KB", **SMALL, num_key_value_heads=2, initializer_range=0.1)
    return folder


@pytest.fixture(scope="module")
def calibrated(dense, tmp_path_factory):
    """(folder of 4-bit weights, adapter, what was said) of that model, nested scales."""
    out = tmp_path_factory.mktemp("calibrated")
    said = calibrate_folder(
        dense, out / "nf4", config(bnb_4bit_use_double_quant=True), IDS, adapter=out / "adapter", rank=4
    )
    assert not [path for path in out.iterdir() if path.name not in ("nf4", "adapter")]
    return out / "nf4", out / "adapter", said


# ---- one matrix ----


@pytest.mark.parametrize("fmt", [*FORMATS, *MICROSCALED], ids=str)
@pytest.mark.parametrize("N, K", [(48, 96), (33, 65), (7, 200)])
def test_less_is_lost(fmt, N, K):
    """Searched scales lose less than plain ones, passed-on errors less again; blocks across rows and odd sizes too."""
    w, H = problem(N, K)
    inputs = solve.Inputs(H)
    found = solve.solve(w, inputs, fmt)
    searched = inputs.error(w - solve._nearest(w, inputs, fmt).values(fmt))
    assert found.choice.method == "passed on" and found.error < searched < found.plain < found.whole
    assert found.error < (0.75 if fmt.blocksize <= 128 else 0.9) * found.plain


def test_errors_are_passed_on_to_all_columns():
    """Those behind the panel, too: the codes of the reference, which knows no panels."""
    w, H = problem(48, 200)
    inputs, fmt = solve.Inputs(H), solve.Format()
    choice = solve._passed_on(w, inputs, solve._nearest(w, inputs, fmt), fmt)
    scales = choice.scales.repeat_interleave(64)[: w.numel()].view(w.shape)[:, inputs.order]
    wanted, _ = reference.round_4bit(w[:, inputs.order], inputs.passes, scales, "nf4")
    same = (choice.codes[:, inputs.order] == wanted).cumprod(1).bool()  # behind a tie both ways are right
    assert same.float().mean() > 0.97


def test_scales_of_either_sign_are_tried():
    """NF4 has one value more above zero: a block whose largest magnitude is negative is often better turned round."""
    w, H = problem(48, 192)
    for fmt in (solve.Format(), solve.Format(nested=True)):
        negative = (solve._nearest(w, solve.Inputs(H), fmt).scales < 0).float().mean()
        assert 0.1 < negative < 0.9


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_packed_is_what_was_chosen(fmt):
    """A reader decodes the values whose error was counted; an odd number of them too."""
    for N, K in ((48, 96), (33, 65)):
        w, H = problem(N, K)
        choice = solve.solve(w, solve.Inputs(H), fmt).choice
        data, state = solve.packed(choice, fmt, w.shape, torch.float32)
        assert torch.equal(functional.dequantize_4bit(data, state), choice.values(fmt))
        again = functional.QuantState.from_dict(state.as_dict(packed=True), device="cpu")
        assert torch.equal(functional.dequantize_4bit(data, again), choice.values(fmt))


def test_every_instruction_set_and_run_gives_the_same():
    w, H = problem()

    def call():
        choice = solve.solve(w, solve.Inputs(H), solve.Format(nested=True)).choice
        return choice.codes, choice.scales

    agree(by_isa(call) | {"again": call()})


@pytest.mark.parametrize(
    "H, why",
    [
        (torch.zeros(96, 96), "no input but zeros"),
        (torch.full((96, 96), float("nan")), "moments that are not finite"),
        (torch.ones(96, 96) * float("inf"), "moments that are not finite"),
        (torch.ones(96, 96) * 10 - torch.eye(96) * 9, "singular moments"),
    ],
)
def test_moments_that_say_nothing(H, why):
    """Scales are searched all the same, and it says why no errors were passed on."""
    w, _ = problem()
    inputs = solve.Inputs(H)
    assert inputs.why == why and inputs.passes is None
    found = solve.solve(w, inputs, solve.Format())
    assert found.choice.method in ("search", "plain") and not found.error > found.plain


def test_a_plain_choice_is_bitsandbytes_own():
    w, H = problem()
    for fmt in FORMATS:
        data, state = solve.packed(solve._plain(w, fmt), fmt, w.shape, w.dtype)
        theirs, known = functional.quantize_4bit(w, None, None, fmt.blocksize, fmt.nested, fmt.quant_type)
        assert torch.equal(data, theirs) and torch.equal(state.absmax, known.absmax)


def test_no_error_is_above_plain_quantization(monkeypatch):
    """The tool itself looks at what a reader will decode, and ends where that is worse."""
    w, H = problem()
    layer = torch.nn.Sequential(torch.nn.Linear(96, 48, bias=False))
    layer[0].weight.data.copy_(w)
    target = layers.Target("0.weight", "0", False, False, solve.Format(), torch.float32)
    layers._linear(layer, target, solve.Inputs(H))
    wrong = solve.packed

    def spoilt(choice, *rest):
        return wrong(choice._replace(codes=choice.codes.flip(0)), *rest)

    monkeypatch.setattr(layers, "packed", spoilt)
    with pytest.raises(RuntimeError, match=r"0.weight: an error of .* is above that of plain quantization"):
        layers._linear(layer, target, solve.Inputs(H))


def test_weights_that_overflow():
    layer = torch.nn.Sequential(torch.nn.Linear(96, 48, bias=False))
    layer[0].weight.data.copy_(problem()[0] * 1e30)
    target = layers.Target("0.weight", "0", False, False, solve.Format(), torch.float32)
    with pytest.raises(ValueError, match=r"0.weight: values up to .*e\+29 and inputs about .* overflow their errors"):
        layers._linear(layer, target, solve.Inputs(problem()[1]))


def test_weights_that_are_not_finite():
    layer = torch.nn.Sequential(torch.nn.Linear(96, 48, bias=False))
    layer[0].weight.data[3, 5] = float("nan")
    target = layers.Target("0.weight", "0", False, False, solve.Format(), torch.float32)
    with pytest.raises(ValueError, match="0.weight: 1 of its 4608 values are not finite"):
        layers._linear(layer, target, solve.Inputs(problem()[1]))


@pytest.mark.parametrize("N, K", [(48, 96), (96, 48)])
def test_the_best_correction(N, K):
    """No other matrix of the rank does better, and the more rank the better."""
    w, H = problem(N, K)
    inputs = solve.Inputs(H)
    left = w - solve.solve(w, inputs, solve.Format()).choice.values(solve.Format())
    root = torch.linalg.cholesky(H.double() + 1e-4 * H.diagonal().mean() * torch.eye(K))
    values = torch.linalg.svdvals(left.double() @ root)
    for rank in (1, 4, 16):
        a, b = low_rank.correction(left, H, rank)
        assert a.shape == (rank, K) and b.shape == (N, rank)
        error = ((left - b @ a).double() @ root).square().sum()
        assert abs(error - values[rank:].square().sum()) <= 1e-3 * values.square().sum()


def test_factors_for_training():
    """The same product, in columns of one norm; a column of zeros stays."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 4, 40, generator=generator), torch.randn(3, 30, 4, generator=generator) * 1e-3
    b[1, :, 2] = 0
    made = low_rank.for_training(a, b)
    assert torch.allclose(low_rank.SCALE * made[1] @ made[0], b @ a, atol=1e-7)
    norms = made[1].norm(dim=1)
    assert norms[1, 2] == 0 and int((norms - low_rank.COLUMN).abs().gt(1e-5).sum()) == 1


# ---- inputs ----


def llama_or_gemma(kind):
    torch.manual_seed(0)
    if kind == "gemma3":
        own = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
        sizes = {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 96}
        return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **own)).eval()
    return moe.model(kind, 4)


@pytest.mark.parametrize("kind", ["gemma3", *moe.FAMILIES])
def test_layers_run_by_themselves_as_in_the_model(kind):
    """Masks and rotations of every kind of layer; experts' own forward changes nothing but how moments are had."""
    model = llama_or_gemma(kind)
    decoder, found = Decoder(model, torch.device("cpu")), []
    hidden = torch.cat(list(decoder.embed(IDS[:2])))
    handles = [layer.register_forward_hook(lambda m, a, out: found.append(out)) for layer in decoder.layers]
    with torch.no_grad():
        logits = model(input_ids=IDS[:2], use_cache=False).logits
    for handle in handles:
        handle.remove()
    decoder.learn(IDS[0], decoder.layers[0], hidden[:1])
    for number, layer in enumerate(decoder.layers):
        names = [name for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)]
        stacks = [n for n, m in layer.named_modules() if is_experts(m)]
        moments = Moments(layer, [*names, *(f"{path}.down_proj" for path in stacks)])
        tensors_of = {name: each.detach().clone() for name, each in (*layer.named_parameters(), *layer.named_buffers())}
        given = decoder.run_with(number, hidden, tensors_of)
        with moments.watching():
            hidden = decoder.run(layer, number, hidden)
        wanted = found[number][0] if isinstance(found[number], tuple) else found[number]
        assert torch.allclose(hidden, wanted, atol=1e-4) and torch.allclose(given, wanted, atol=1e-4), number
    assert torch.allclose(decoder.finish(hidden, decoder.outside()), logits, atol=1e-4)


# ---- folders and models ----


def logits(model):
    with torch.no_grad():
        return model(IDS[:3].to(model.device)).logits.float().cpu()


def distance(model, wanted):
    return (logits(model) - wanted).square().mean().item()


def test_a_folder_that_everybody_reads(dense, calibrated, tmp_path):
    """Names, dtypes and shapes are those of plain quantization; what comes out is nearer to the dense model."""
    folder, adapter, said = calibrated
    quantize_folder(dense, tmp_path / "plain", config(bnb_4bit_use_double_quant=True))
    ours, plain = tensors(folder), tensors(tmp_path / "plain")
    described = {name for name in ours if "quant_state" in name}  # JSON, whose length is that of its numbers
    assert {n: (t.dtype, t.shape) for n, t in ours.items() if n not in described} == {
        n: (t.dtype, t.shape) for n, t in plain.items() if n not in described
    }
    assert described == {name for name in plain if "quant_state" in name}
    wanted = logits(AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lost = distance(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32), wanted)
    assert distance(model, wanted) < 0.7 * lost
    assert len(said.layers) == 3 and all(each.error < each.plain for each in said.layers)
    assert layers.summary(said.layers)["methods"] == {"passed on": 21}
    corrected = PeftModel.from_pretrained(model, adapter)
    assert distance(corrected, wanted) < 0.55 * lost
    assert len(lora.fuse(corrected).fused) == 21 and distance(corrected, wanted) < 0.55 * lost


@pytest.mark.parametrize("rank", [0, 8])
def test_layers_get_what_those_before_them_make_in_4_bits(dense, tmp_path, monkeypatch, rank):
    """With their adapters, where there are some: the moments are those of the finished model's own inputs."""
    given = []

    class Inputs(solve.Inputs):
        def __init__(self, H):
            given.append(H.clone())
            super().__init__(H)

    monkeypatch.setattr(layers, "Inputs", Inputs)
    adapter = tmp_path / "adapter" if rank else None
    calibrate_folder(dense, tmp_path / "out", config(), IDS, adapter=adapter, rank=rank or 16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.nn.Module.float(model)  # which transformers refuses for a quantized model; its packed weights stay
    last = model.model.layers[2].self_attn.q_proj
    model = PeftModel.from_pretrained(model, adapter) if rank else model
    seen = []
    last.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].reshape(-1, 64)))
    with torch.no_grad():
        model(IDS.to(model.device))
    (x,) = (each.cpu() for each in seen)
    found, wanted = given[8], x.t() @ x / len(x)  # four inputs a layer: of q, o, gate and down
    assert len(given) == 12 and (found - wanted).norm() < 1e-4 * wanted.norm()


def test_a_model_in_memory_and_a_second_run(dense, calibrated, tmp_path):
    """The bytes of a folder, where no adapter stood in between; biases, dtypes and saving as after from_pretrained."""
    settings = config(bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(dense)
    wanted = logits(AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32))
    reports = calibrate(model, IDS, settings)
    assert len(reports) == 3 and model.is_loaded_in_4bit and distance(model, wanted) < 0.1 * wanted.square().mean()
    model.save_pretrained(tmp_path / "saved")
    for name in ("first", "second"):
        calibrate_folder(dense, tmp_path / name, settings, IDS)
    same(tensors(tmp_path / "first"), tensors(tmp_path / "second"))
    same(tensors(tmp_path / "first"), tensors(tmp_path / "saved"))
    with pytest.raises(ValueError, match="this model is quantized already"):
        calibrate(model, IDS, settings)


def test_int8_is_refused(dense, tmp_path):
    """It has no codes to choose; nothing is written."""
    eight, model = BitsAndBytesConfig(load_in_8bit=True), AutoModelForCausalLM.from_pretrained(dense)
    with pytest.raises(ValueError, match="of 4-bit weights, the quantization_config has load_in_8bit"):
        calibrate(model, IDS, eight)
    with pytest.raises(ValueError, match="has no load_in_4bit"):
        calibrate(model, IDS, BitsAndBytesConfig())
    with pytest.raises(ValueError, match="bitshard quantize --bits 8"):
        calibrate_folder(dense, tmp_path / "out", eight, IDS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("consume", [False, True])
def test_an_interrupted_run_goes_on(dense, tmp_path, monkeypatch, consume):
    """Behind the last whole layer, and among the files; another run does not, nor one of files that have changed, and
    it is said where the layers are."""
    shutil.copytree(dense, tmp_path / "dense")
    calibrate_folder(tmp_path / "dense", tmp_path / "whole", config(), IDS)
    keep, kept = stored.KeptLayers.keep, []

    def stops(self, number, *rest):
        if number == 2:
            raise KeyboardInterrupt
        kept.append(number)
        keep(self, number, *rest)

    monkeypatch.setattr(stored.KeptLayers, "keep", stops)
    with pytest.raises(KeyboardInterrupt):
        calibrate_folder(tmp_path / "dense", tmp_path / "out", config(), IDS, consume=consume)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out.calibration", "whole"]
    with pytest.raises(ValueError, match="calibration with other arguments or files has left"):
        calibrate_folder(tmp_path / "dense", tmp_path / "out", config(), IDS[:4], consume=consume)
    file = next((tmp_path / "dense").glob("*.safetensors"))
    written = file.stat()
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns + 1))
    with pytest.raises(ValueError, match="calibration with other arguments or files has left"):
        calibrate_folder(tmp_path / "dense", tmp_path / "out", config(), IDS, consume=consume)
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))
    monkeypatch.setattr(
        stored.KeptLayers, "keep", lambda self, number, *rest: kept.append(number) or keep(self, number, *rest)
    )
    calibrate_folder(tmp_path / "dense", tmp_path / "out", config(), IDS, consume=consume)
    assert kept == [0, 1, 2]
    same(tensors(tmp_path / "out"), tensors(tmp_path / "whole"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out", "whole"]
    assert bool(list((tmp_path / "dense").glob("*.safetensors"))) is not consume


def test_upstream_decodes_the_same_values(calibrated, tmp_path):
    """The original's CPU build, with transformers, from the same folder. (Where K is no multiple of the blocksize that
    build does not decode what it has quantized itself.)"""
    upstream.folder_or_skip()
    decoded = tmp_path / "dense.safetensors"
    upstream.run(upstream.SCRIPTS / "upstream_checkpoints.py", "dense", str(calibrated[0]), str(decoded))
    theirs = load_file(decoded)
    model = AutoModelForCausalLM.from_pretrained(calibrated[0])
    ours = {n: m.weight for n, m in model.named_modules() if hasattr(m, "quant_state")}
    assert ours.keys() == theirs.keys() and len(ours) == 21
    for name, weight in ours.items():
        assert torch.equal(functional.dequantize_4bit(weight.data, weight.quant_state).cpu(), theirs[name]), name
    assert any((w.quant_state.absmax.to(torch.int) < 128).any() for w in ours.values())  # codes of negative scales


def test_training_on_shards_of_it(calibrated, tmp_path):
    """Two processes under FSDP2: each step's loss is that of one process."""
    for world in (1, 2):
        launch(world, "calibrated.py", str(calibrated[0]), str(tmp_path / str(world)))
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("1", "2"))
    assert two["sharded"] == "1/2.00" and one["losses"][0] > one["losses"][-1]
    assert max(abs(a - b) for a, b in zip(one["losses"], two["losses"], strict=True)) < 1e-4


# ---- tuning ----

STEPS = 10
# each sample four times: those that are held back are seen, too, and so gain in a few steps of a small model
TUNED_ON = torch.randint(0, 96, (12, 32), generator=torch.Generator().manual_seed(2)).repeat(4, 1)


@pytest.mark.parametrize("fmt, N, K", [(FORMATS[0], 33, 65), (FORMATS[1], 16, 64), (FORMATS[3], 48, 96)], ids=str)
def test_the_gradient_of_scales(fmt, N, K):
    """That of (1 + t) s c, written down with torch; values are those that a reader decodes from the result."""
    w, H = problem(N, K)
    choice = solve.solve(w, solve.Inputs(H), fmt).choice
    data, state = solve.packed(choice, fmt, w.shape, torch.bfloat16)
    weight = tuning.Trained(layers.Made(data, state, None, 0, 0, 0, {}), torch.device("cpu"))
    asked = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    (weight.values() * asked).sum().backward()
    t = torch.zeros(len(choice.scales), requires_grad=True)
    (choice._replace(scales=choice.scales * (1 + t)).values(fmt) * asked).sum().backward()
    assert (weight.change.grad - t.grad).abs().max() < 1e-5 * t.grad.abs().max() and t.grad.abs().min() > 0
    assert torch.equal(weight.values().detach(), choice.values(fmt)) or fmt.nested
    with torch.no_grad():
        weight.change.copy_(torch.linspace(-0.1, 0.1, len(t)))
    made = weight.result()
    reader = functional.QuantState.from_dict(made.state.as_dict(packed=True), device="cpu")
    reader.dtype = torch.float32
    found = functional.dequantize_4bit(made.packed, reader)
    assert torch.equal(made.packed, data) and made.state.dtype == torch.bfloat16
    assert (found - weight.values()).abs().max() < 1e-6 * found.abs().max()
    wanted = choice._replace(scales=choice.scales * (1 + weight.change.detach())).values(fmt)
    assert (found - wanted).norm() < (0.02 if fmt.nested else 1e-6) * wanted.norm()


def held_back(model, dense, seed=0):
    """Mean divergence in nats a token on the samples that tuning holds back."""
    ids = TUNED_ON[
        torch.randperm(len(TUNED_ON), generator=torch.Generator().manual_seed(seed))[: len(TUNED_ON) // tuning.HELD]
    ]
    with torch.no_grad():
        ours, theirs = (m(ids.to(m.device)).logits.float().cpu().log_softmax(-1) for m in (model, dense))
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


@pytest.mark.parametrize("nested, rank", [(False, 0), (True, 4)])
def test_tuned_weights_are_nearer_to_the_dense_model(dense, tmp_path, nested, rank):
    """In the same codes; what is reported is what the files give; the same bytes again, in memory, and with a seed."""
    settings = config(bnb_4bit_use_double_quant=nested)
    adapters = {name: tmp_path / f"{name}-adapter" if rank else None for name in ("plain", "tuned", "again")}
    given = {"ids": TUNED_ON, "quantization_config": settings, "rank": rank or 16}
    calibrate_folder(dense, tmp_path / "plain", adapter=adapters["plain"], **given)
    said = [
        calibrate_folder(dense, tmp_path / name, adapter=adapters[name], tune_steps=STEPS, **given)
        for name in ("tuned", "again")
    ]
    assert said[0].tuned == said[1].tuned and said[0].tuned.kept and said[0].tuned.steps == STEPS
    plain, tuned = tensors(tmp_path / "plain"), tensors(tmp_path / "tuned")
    same(tuned, tensors(tmp_path / "again"))
    changed = {name.rpartition(".")[2] for name in plain if not torch.equal(plain[name], tuned[name])}
    assert changed == {"absmax"}
    wanted = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    found = {}
    for name in ("plain", "tuned"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, adapters[name]) if rank else model
        found[name] = held_back(model, wanted)
    assert found["tuned"] < 0.99 * found["plain"]
    for name, reported in (("plain", said[0].tuned.before), ("tuned", said[0].tuned.after)):
        assert abs(found[name] / reported - 1) < 2e-2  # the loaded model rounds its weights to bfloat16
    if rank:
        factors = [load_file(adapters[name] / "adapter_model.safetensors") for name in ("plain", "tuned", "again")]
        assert all(not torch.equal(factors[0][key], factors[1][key]) for key in factors[0])
        same(factors[1], factors[2])
        return
    model = AutoModelForCausalLM.from_pretrained(dense)
    calibrate(model, TUNED_ON, settings, tune_steps=STEPS)
    model.save_pretrained(tmp_path / "saved")
    same(tuned, tensors(tmp_path / "saved"))
    calibrate_folder(dense, tmp_path / "other", tune_steps=STEPS, seed=1, **given)
    assert any(not torch.equal(tuned[key], each) for key, each in tensors(tmp_path / "other").items())


def test_weights_that_tuning_made_worse_stay_as_they_were(dense, tmp_path, monkeypatch):
    """With too large a rate, and where memory ends; it is said, and a model in memory warns."""
    calibrate_folder(dense, tmp_path / "plain", config(), TUNED_ON)
    monkeypatch.setattr(tuning, "LR", 9.0)
    said = calibrate_folder(dense, tmp_path / "worse", config(), TUNED_ON, tune_steps=2).tuned
    assert not said.kept and said.after > said.before
    assert said.line() == f"not tuned, weights are as calibrated: its divergence on samples not seen would go from " \
        f"{said.before:.5f} to {said.after:.5f} nats a token"  # fmt: skip
    same(tensors(tmp_path / "worse"), tensors(tmp_path / "plain"))
    model = AutoModelForCausalLM.from_pretrained(dense)
    with pytest.warns(UserWarning, match="not tuned, weights are as calibrated"):
        calibrate(model, TUNED_ON, config(), tune_steps=2)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tuning, "Student", full)
    said = calibrate_folder(dense, tmp_path / "full", config(), TUNED_ON, tune_steps=2).tuned
    assert not said.kept and "do not fit into the memory of cpu" in said.line()
    same(tensors(tmp_path / "full"), tensors(tmp_path / "plain"))


def test_tuning_with_few_logits_at_once(dense, tmp_path, monkeypatch):
    """A vocabulary too large for a whole step: logits of 135 tokens at a time, and the same but for roundings."""
    most = []
    decoder_finish = Decoder.finish

    def finish(self, hidden, outside):
        most.append(hidden.shape[0] * hidden.shape[1])
        return decoder_finish(self, hidden, outside)

    monkeypatch.setattr(Decoder, "finish", finish)
    whole = calibrate_folder(dense, tmp_path / "whole", config(), TUNED_ON, tune_steps=STEPS).tuned
    assert max(most) == 45 * 32  # a step's
    most.clear()
    monkeypatch.setattr(tuning, "LOGITS", 3 * 45 * 96 + 5)
    parts = calibrate_folder(dense, tmp_path / "parts", config(), TUNED_ON, tune_steps=STEPS).tuned
    assert max(most) == 3 * 45 and parts.kept
    assert abs(parts.before / whole.before - 1) < 1e-5 and abs(parts.after / whole.after - 1) < 1e-3
    found, wanted = (tensors(tmp_path / name) for name in ("parts", "whole"))
    scales = [key for key in wanted if key.endswith("absmax")]
    same({k: v for k, v in found.items() if k not in scales}, {k: v for k, v in wanted.items() if k not in scales})
    assert all((found[key] / wanted[key] - 1).abs().max() < 1e-3 for key in scales)


def test_interrupted_tuning(dense, tmp_path, monkeypatch):
    """Layers stay; the same run tunes from its beginning, once, and one without tuning goes on with them, too."""
    calibrate_folder(dense, tmp_path / "whole", config(), TUNED_ON, tune_steps=4)
    calibrate_folder(dense, tmp_path / "plain", config(), TUNED_ON)
    kept = []
    keep = stored.KeptLayers.keep
    monkeypatch.setattr(
        stored.KeptLayers, "keep", lambda self, number, *rest: kept.append(number) or keep(self, number, *rest)
    )

    def stops(steps, total):
        yield next(iter(steps))
        raise KeyboardInterrupt

    for name, again in (("tuned", {"tune_steps": 4}), ("untuned", {"tune_steps": 0})):
        out = tmp_path / name
        with pytest.raises(KeyboardInterrupt):
            calibrate_folder(dense, out, config(), TUNED_ON, tune_steps=4, tune_progress=stops)
        assert not out.exists() and not (tmp_path / f"{name}.calibration" / "tuned.safetensors").exists()
        calibrate_folder(dense, out, config(), TUNED_ON, **again)
        assert kept == [0, 1, 2] and not list(tmp_path.glob("*.calibration"))
        kept.clear()
        same(tensors(out), tensors(tmp_path / ("whole" if again["tune_steps"] else "plain")))

    def full(*_, **__):
        raise OSError(28, "No space left on device", "model")

    given = (dense, tmp_path / "late", config(), TUNED_ON)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "quantize_folder", full)
        with pytest.raises(OSError, match="No space left"):
            calibrate_folder(*given, tune_steps=4)
    monkeypatch.setattr(folders, "tune", None)  # it is done
    assert calibrate_folder(*given, tune_steps=4).tuned.kept
    same(tensors(tmp_path / "late"), tensors(tmp_path / "whole"))


def test_whether_to_tune():
    """On a GPU unless it is said otherwise or there is one sample only; on a CPU only where it is said."""
    for device, steps, count, wanted in (
        ("cpu", None, 9, 0), ("cuda", None, 9, tuning.STEPS), ("cuda", None, 1, 0), ("cuda", 0, 9, 0), ("cpu", 7, 2, 7),
    ):  # fmt: skip
        assert tuning.settings_of(steps, 5, torch.device(device), count) == (wanted, 5)
    for steps, count, words in ((-1, 9, "-1 steps of tuning"), (1, 1, "there is only 1")):
        with pytest.raises(ValueError, match=words):
            tuning.settings_of(steps, 0, torch.device("cpu"), count)


def test_dropout_of_a_config_is_off(dense, tmp_path):
    """Layers run as they infer: the same bytes twice, tuned or not."""
    shutil.copytree(dense, tmp_path / "dense")
    settings = json.loads((dense / "config.json").read_text()) | {"attention_dropout": 0.5}
    (tmp_path / "dense" / "config.json").write_text(json.dumps(settings))
    for name, source in (("a", dense), ("b", tmp_path / "dense")):
        calibrate_folder(source, tmp_path / name, config(), TUNED_ON[:6], tune_steps=1)
    same(tensors(tmp_path / "a"), tensors(tmp_path / "b"))


# ---- text, and the command ----


def tokenizer(_=None):
    class Bytes:
        def __call__(self, text, verbose):
            return {"input_ids": list(text.encode())}

    return Bytes()


def test_samples_of_every_kind_of_file(tmp_path):
    import pyarrow
    import pyarrow.parquet

    text = "".join(chr(97 + i * 7 % 26) for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": text[:500]}) + "\n\n" + json.dumps({"text": text[502:]}) + "\n"
    )
    pyarrow.parquet.write_table(pyarrow.table({"words": [text[:500], None, text[502:]]}), tmp_path / "a.parquet")
    plain = samples(tmp_path / "a.txt", tokenizer(), 5, 100, seed=3)
    assert plain.shape == (5, 100) and plain.dtype == torch.int64
    assert torch.equal(plain, samples(tmp_path / "a.txt", tokenizer(), 5, 100, seed=3))
    assert not torch.equal(plain, samples(tmp_path / "a.txt", tokenizer(), 5, 100, seed=4))
    assert samples(tmp_path / "a.jsonl", tokenizer(), 50, 100).shape == (10, 100)
    columns = samples(tmp_path / "a.parquet", tokenizer(), 50, 100, column="words")
    assert torch.equal(columns, samples(tmp_path / "a.jsonl", tokenizer(), 50, 100))
    (tmp_path / "folder").mkdir()
    shutil.copy(tmp_path / "a.txt", tmp_path / "folder")
    assert torch.equal(samples(tmp_path / "folder", tokenizer(), 5, 100, seed=3), plain)


def parquet_of_numbers():
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), made := pyarrow.BufferOutputStream())
    return made.getvalue().to_pybytes()


def text_of(kind, folder):
    endings = {"jsonl": "jsonl", "column": "jsonl", "parquet": "parquet", "numbers": "parquet"}
    path = folder / f"t.{endings.get(kind, 'txt')}"
    contents = {
        "short": b"too short", "empty": b"", "binary": bytes(range(256)) * 40, "jsonl": b"{no json\n",
        "column": b'{"words": "x"}\n', "parquet": b"no parquet", "absent": None, "good": b"some words of a text. " * 90,
        "zeros": b"text\0\0" * 90, "numbers": parquet_of_numbers(),
    }[kind]  # fmt: skip
    if contents is not None:
        path.write_bytes(contents)
    return path


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("tiny") / "made")[0]


@pytest.mark.parametrize(
    "kind, options, words",
    [
        ("short", [], "9 tokens of text, and a sample has 64"),
        ("empty", [], "0 tokens of text"),
        ("binary", [], "no UTF-8 text (byte 128)"),
        ("jsonl", [], "line 1: no JSON"),
        ("column", [], "line 1: no text in a column 'text'"),
        ("parquet", [], "no parquet file"),
        ("absent", [], "No such file or folder"),
        ("good", ["--samples", "0"], "--samples 0: expected 1 or more"),
        ("zeros", [], "no text (character 4 is a zero byte)"),
        ("numbers", [], "no text in a column 'text', but int64"),
        ("good", ["--calibrate", ""], "a text without a name"),
        ("good", ["--seed", "-1"], "--seed -1: expected a number from 0"),
        ("good", ["--max-shard-size", "x"], "max_shard_size='x'"),
        ("good", ["--rank", "2"], "add --adapter FOLDER"),
        ("good", ["--rank", "0", "--adapter", "a"], "--rank 0"),
        ("good", ["--adapter", "out/a"], "expected one beside the other"),
        ("good", ["--adapter", "x/../out"], "expected one beside the other"),
        ("good", ["--adapter", "."], "exists already"),
        ("good", ["--tune", "-1"], "--tune -1: expected 0 or more"),
        ("good", ["--tune", "1", "--samples", "1"], "there is only 1"),
    ],
)
def test_mistakes_are_one_line(with_tokenizer, tmp_path, kind, options, words, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = text_of(kind, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    given = ["--calibrate", str(text), "--length", "64", *options]
    wrong_argument = {"0", "-1", "x", "2"} & set(options)
    assert main.main(["quantize", str(with_tokenizer), str(tmp_path / "out"), *given]) == 1 + bool(wrong_argument)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and words in err, err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_other_mistakes(dense, calibrated, with_tokenizer, tmp_path, capsys):
    """A tokenizer that is not there or does not fit, weights that are quantized, an adapter without calibration."""
    text = text_of("good", tmp_path)
    (tmp_path / "misfit").mkdir()
    shutil.copytree(dense, tmp_path / "misfit", dirs_exist_ok=True)
    for file in with_tokenizer.glob("token*"):
        shutil.copy(file, tmp_path / "misfit")
    for folder, options, words in (
        (dense, ["--calibrate", str(text)], "no tokenizer"),
        (tmp_path / "misfit", ["--calibrate", str(text), "--length", "64"], "the tokenizer does not fit the model"),
        (calibrated[0], ["--calibrate", str(text)], "quantized already"),
        (dense, ["--adapter", "a"], "--adapter corrects what calibration leaves"),
        (dense, ["--tune", "9"], "--tune follows calibration"),
    ):
        wrong_argument = "--calibrate" not in options
        assert main.main(["quantize", str(folder), str(tmp_path / "out"), *options]) == 1 + wrong_argument
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and words in err, err
    with pytest.raises(NotImplementedError, match="T5Model: calibration runs the decoder layers of decoders alone"):
        Decoder(T5Model(T5Config(**T5)), torch.device("cpu"))
    with pytest.raises(ValueError, match="samples of 2049 tokens: the model has 2048 positions"):
        calibrate_folder(dense, tmp_path / "out", config(), torch.zeros(1, 2049, dtype=torch.long))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["misfit", "t.txt"]


def test_a_full_disk(dense, tmp_path, monkeypatch):
    """While a layer is kept: the error of the system with the file's name, and nothing is left."""

    replace = os.replace

    def full(source, target):
        if target.name.startswith("layer"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(output.os, "replace", full)
    with pytest.raises(OSError, match="No space left on device: .*layer-00000.safetensors"):
        calibrate_folder(dense, tmp_path / "out", config(), IDS)
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_cannot_be_written(dense, tmp_path, monkeypatch):
    """Neither it nor the weights have their names; the same run again makes both."""

    write_whole = output.write_whole

    def full(path, data):
        if path.name == "adapter_model.safetensors":
            raise OSError(28, "No space left on device", "adapter")
        write_whole(path, data)

    given = (dense, tmp_path / "out", config(), IDS)
    with monkeypatch.context() as patch:
        patch.setattr(output, "write_whole", full)
        with pytest.raises(OSError, match="No space left"):
            calibrate_folder(*given, adapter=tmp_path / "adapter", rank=4)
    assert [path.name for path in tmp_path.iterdir()] == ["out.calibration"]
    calibrate_folder(*given, adapter=tmp_path / "adapter", rank=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "out"]


def test_the_command(with_tokenizer, tmp_path, capsys):
    text = text_of("good", tmp_path)
    out, adapter = tmp_path / "out", tmp_path / "adapter"
    given = ["--calibrate", str(text), "--length", "64", "--samples", "4", "--adapter", str(adapter), "--rank", "2"]
    assert main.main(["quantize", str(with_tokenizer), str(out), *given]) == 0
    said = capsys.readouterr().out
    assert "lost of the layers' products, squared, on average:" in said and "passed on" in said
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["r"] == 2 and settings["lora_alpha"] == 4
    assert (
        main.main(
            [
                "quantize",
                str(with_tokenizer),
                str(tmp_path / "two"),
                *given[:4],
                "--samples",
                "99",
                "--tune",
                "2",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)["calibration"]
    assert found["error"] < found["plain"] and found["samples"] == 30 and found["tuned"]["steps"] == 2
    AutoModelForCausalLM.from_pretrained(out)


def test_the_lines_of_the_page(with_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text_of("good", tmp_path).rename("text.txt")
    shutil.copytree(with_tokenizer, "Llama-3-8B")
    page = (ROOT / "docs" / "calibration.md").read_text()
    (lines,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for words, small in (("count=128", "count=3"), ("length=2048", "length=64"), ('"cuda"', '"cpu"')):
        assert words in lines
        lines = lines.replace(words, small)
    model = AutoModelForCausalLM.from_pretrained(with_tokenizer)
    given = {"tokenizer": AutoTokenizer.from_pretrained(with_tokenizer), "model": model}
    exec(lines, given | {"quantization_config": config()})
    assert model.is_loaded_in_4bit and (tmp_path / "Llama-3-8B-nf4" / "model.safetensors").exists()
