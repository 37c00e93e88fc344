"""Calibration of MXFP4 and NVFP4: scales stay 8-bit floats, codes make up for one another's errors."""

import pytest
import reference
import torch
from bitshard import functional
from bitshard.calibration import calibrate, calibrate_folder, layers, solve, tuning
from bitshard.convert.look import look
from bitshard.convert.quantize import quantize_folder
from bitshard.kinds import kind_of
from bitshard_cli import main
from helpers import moe
from helpers.alike import agree, by_isa
from helpers.files import same, tensors
from helpers.microscaled import SCALE
from test_calibration import (
    IDS,
    MICROSCALED,
    TUNED_ON,
    config,
    dense,
    distance,
    held_back,
    logits,
    problem,
    text_of,
    with_tokenizer,
)
from transformers import AutoModelForCausalLM

__all__ = ["dense", "with_tokenizer"]  # fixtures


def bytes_of(state):
    """Its scales as the specification's float32 numbers, and the global one of each."""
    parts = state.kind.parts(state)
    second = state.state2.absmax.view(parts, -1).repeat_interleave(256, 1)[:, : len(state.absmax) // parts]
    return SCALE[state.quant_type][state.absmax.long()], second.reshape(-1)


@pytest.mark.parametrize("fmt", MICROSCALED, ids=str)
def test_packed_is_what_was_chosen(fmt):
    """Each scale is a byte of the format times the global one, as a reader decodes it; an odd number of values too."""
    for N, K in ((48, 96), (33, 65), (300, 64)):
        w, H = problem(N, K)
        choice = solve.solve(w, solve.Inputs(H), fmt).choice
        data, state = solve.packed(choice, fmt, w.shape, torch.float32)
        assert state.kind is kind_of(fmt.quant_type) and torch.equal(
            functional.dequantize_4bit(data, state), choice.values(fmt)
        )
        again = functional.QuantState.from_dict(state.as_dict(packed=True), device="cpu")
        assert again == state
        scales, whole = bytes_of(state)
        assert torch.equal(scales * whole, choice.scales) and bool((scales > 0).all())
        assert len(whole.unique()) == 1 and (fmt.quant_type == "nvfp4" or whole[0] == 1)


def test_scales_to_the_nearest_are_the_specifications():
    w, _ = problem()
    for fmt in MICROSCALED:
        data, state = solve.packed(solve._plain(w, fmt), fmt, w.shape, w.dtype)
        theirs, known = kind_of(fmt.quant_type).quantize(w, quant_storage=torch.uint8)
        assert torch.equal(data, theirs) and state == known


@pytest.mark.parametrize("fmt", MICROSCALED, ids=str)
def test_every_scale_of_the_format_can_be_chosen(fmt):
    """Of the candidates of a block the best is taken, by the definition, and none is refused by a reader."""
    w, H = problem(48, 64)
    w = w * torch.logspace(-10, 6, 48).unsqueeze(1)
    choice = solve._nearest(w, solve.Inputs(H), fmt)
    _, state = solve.packed(choice, fmt, w.shape, w.dtype)
    functional.QuantState.from_dict(state.as_dict(packed=True), device="cpu")
    largest = solve._absmax(w, fmt.blocksize)
    levels = solve.Floats.of(fmt.kind, largest, w.shape)
    wanted, _ = levels.nearest(levels.wanted(largest))
    errors = reference.search_4bit(w.view(-1), H.diagonal().contiguous(), wanted, fmt.blocksize, "e2m1")
    best = wanted.gather(1, errors.argmin(1, keepdim=True)).squeeze(1)
    mine = (wanted == choice.scales.unsqueeze(1)).float() * -1.0
    chosen = errors.gather(1, mine.argmin(1, keepdim=True)).squeeze(1)
    assert (chosen <= errors.min(1).values * (1 + 1e-5)).all()
    assert (best == choice.scales).float().mean() > 0.9 and len(state.absmax.unique()) > 12


@pytest.mark.parametrize("fmt", MICROSCALED, ids=str)
def test_every_instruction_set_gives_the_same(fmt):
    w, H = problem()

    def call():
        choice = solve.solve(w, solve.Inputs(H), fmt).choice
        return choice.codes, choice.scales

    agree(by_isa(call) | {"again": call()})


@pytest.mark.parametrize("quant_type", ["mxfp4", "nvfp4"])
def test_a_folder_and_a_model_in_memory(dense, tmp_path, quant_type):
    """Nearer to the dense model than quantized to the nearest; the same bytes in memory; sound files."""
    settings = config(True, bnb_4bit_quant_type=quant_type)
    said = calibrate_folder(dense, tmp_path / "out", settings, IDS)
    quantize_folder(dense, tmp_path / "plain", settings)
    assert len(said.layers) == 3 and all(each.error < 0.8 * each.plain for each in said.layers)
    assert tensors(tmp_path / "out").keys() == tensors(tmp_path / "plain").keys()
    wanted = logits(AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32))
    found = {name: distance(AutoModelForCausalLM.from_pretrained(tmp_path / name), wanted) for name in ("out", "plain")}
    assert found["out"] < 0.8 * found["plain"]
    model = AutoModelForCausalLM.from_pretrained(dense)
    calibrate(model, IDS, settings)
    model.save_pretrained(tmp_path / "saved")
    same(tensors(tmp_path / "out"), tensors(tmp_path / "saved"))
    looked = look(tmp_path / "out")
    assert not looked.complaints and {each.format for each in looked.weights if each.details} == {quant_type}


@pytest.mark.parametrize("quant_type", ["mxfp4", "nvfp4"])
def test_mixtures(tmp_path, quant_type):
    """Each expert for its own tokens, in NVFP4 with a global scale of its own."""
    moe.model("qwen3_moe", 4, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    settings = config(True, bnb_4bit_quant_type=quant_type)
    said = calibrate_folder(tmp_path / "dense", tmp_path / "out", settings, IDS)
    assert all(each.error < each.plain for each in said.layers if each.methods)
    quantize_folder(tmp_path / "dense", tmp_path / "plain", settings)
    wanted = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32))
    models = {name: AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "plain")}
    assert distance(models["out"], wanted) < distance(models["plain"], wanted)
    state = models["out"].model.layers[0].mlp.experts.packed_stacks["down_proj"].state
    assert state.kind is kind_of(quant_type).stack
    scales = state.state2.absmax.unique()  # two experts of random numbers may have the same
    assert len(scales) in ((3, 4) if quant_type == "nvfp4" else (1,))


@pytest.mark.parametrize("fmt", MICROSCALED, ids=str)
def test_tuned_scales_stay_in_the_format(fmt):
    """What tuning multiplies with is what a reader decodes of its result."""
    w, H = problem(33, 65)
    choice = solve.solve(w, solve.Inputs(H), fmt).choice
    data, state = solve.packed(choice, fmt, w.shape, torch.float32)
    weight = tuning.Trained(layers.Made(data, state, None, 0, 0, 0, {}), torch.device("cpu"))
    assert torch.equal(weight.values().detach(), choice.values(fmt))
    with torch.no_grad():
        weight.change.copy_(torch.linspace(-0.6, 0.6, len(weight.change)))
    made = weight.result()
    reader = functional.QuantState.from_dict(made.state.as_dict(packed=True), device="cpu")
    found = functional.dequantize_4bit(made.packed, reader)
    assert torch.equal(found, weight.values().detach()) and torch.equal(made.packed, data)
    assert not torch.equal(made.state.absmax, state.absmax) and made.state.kind is state.kind
    scales, whole = bytes_of(made.state)
    wanted = choice.scales * (1 + weight.change.detach())
    assert ((scales * whole - wanted).abs() <= 0.34 * wanted).all()


def test_tuned_nvfp4(dense, tmp_path):
    """Nearer to the dense model on samples that were not seen, and so are the files."""
    settings = config(True, bnb_4bit_quant_type="nvfp4")
    said = calibrate_folder(dense, tmp_path / "out", settings, TUNED_ON, tune_steps=30).tuned
    assert said.kept and said.after < said.before
    model, wanted = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (tmp_path / "out", dense)
    )
    assert abs(held_back(model, wanted) / said.after - 1) < 2e-2


@pytest.mark.parametrize("quant_type", ["mxfp4", "nvfp4"])
def test_the_command(with_tokenizer, tmp_path, capsys, quant_type):
    given = ["--type", quant_type, "--calibrate", str(text_of("good", tmp_path)), "--length", "64", "--samples", "4"]
    assert main.main(["quantize", str(with_tokenizer), str(tmp_path / "out"), *given]) == 0
    said = capsys.readouterr().out
    assert "lost of the layers' products, squared, on average:" in said and "passed on" in said
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
