"""bitshard.calibration: what its caller has set for all of torch, activations that are no numbers, large texts."""

import pytest
import torch
from bitshard.calibration import calibrate, samples
from bitshard.calibration.decoder import float32_products
from helpers import tiny
from test_calibration import config, tokenizer

MATMUL = torch.backends.cuda.matmul
ONE_LAYER = {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(params=["high", "tf32"])
def caller(request):
    """What gives the setting of a caller who wants TF32, by torch's older interface or by the newer one."""
    if request.param == "high":
        torch.set_float32_matmul_precision("high")
        yield torch.get_float32_matmul_precision
    elif not hasattr(MATMUL, "fp32_precision"):
        pytest.skip("this torch has the older interface only")
    else:
        MATMUL.fp32_precision = "tf32"
        yield lambda: MATMUL.fp32_precision
    torch.set_float32_matmul_precision("highest")


def test_layers_run_in_float32_whatever_is_set(caller):
    """No TF32 in moments and hidden states; afterwards all is as it was, after an error, too."""
    model, before, seen = tiny.llama(**ONE_LAYER), caller(), []

    def watched(reports, _):
        for report in reports:
            seen.append(caller())
            yield report

    calibrate(model, torch.arange(64).view(2, 32), config(), layer_progress=watched)
    assert seen == ["highest" if before == "high" else "ieee"] and caller() == before
    with pytest.raises(ZeroDivisionError), float32_products("highest"):
        raise ZeroDivisionError
    assert caller() == before
    with float32_products("high"):
        assert caller() == before


def test_tuning_what_gives_no_numbers():
    """Not one step is done."""
    model, steps = tiny.llama(**ONE_LAYER), []
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3] = float("nan")
    with pytest.warns(UserWarning, match="not tuned, weights are as calibrated: its divergence .* is nan"):
        reports = calibrate(
            model,
            torch.arange(64).view(2, 32),
            config(),
            tune_steps=9,
            tune_progress=lambda _, total: steps.append(total),
        )
    assert not steps and "moments that are not finite" in reports[0].remarks[0]


def test_of_a_large_text_only_its_beginning_is_read(tmp_path):
    """32 characters for each token that is wanted, of one file and of a folder's files together."""
    given = []

    class Counts(type(tokenizer())):
        def __call__(self, text, verbose):
            given.append(len(text))
            return super().__call__(text, verbose)

    (tmp_path / "a.txt").write_text("words " * 1000)
    assert samples(tmp_path / "a.txt", Counts(), 3, 8).shape == (3, 8)
    (tmp_path / "b.txt").write_text("other " * 1000)
    assert samples(tmp_path, Counts(), 3, 8).shape == (3, 8)
    assert given == [32 * 3 * 8, 32 * 3 * 8]
