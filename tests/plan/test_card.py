"""Rates of a GPU that are measured at its first use: fitted to times, kept in a file, used by the plan. No GPU here."""

import json
import types

import pytest
import torch
from bitshard import _C
from bitshard.functions import card

CARDS = ((75, 40), (86, 28), (80, 108), (89, 76), (120, 84))  # a T4, a 3060, an A100, smaller Ada and Blackwell
SHAPES = ((4096, 4096), (14336, 4096), (1024, 4096))


@pytest.fixture(autouse=True)
def counted():
    yield
    for sm, _ in CARDS:
        _C.set_card_rates(sm)


def other_card(sm):
    """Rates that are far from the data sheet's."""
    counted = _C.card_rates(sm)
    speeds = (
        counted["flops_per_ns_sm"] * 1.4,
        counted["bytes_per_ns_sm"] * 0.6,
        counted["dequantized_per_ns_sm"] * 0.6,
    )
    return (*speeds, ((0.7, 0.8), (0.6, 0.9)), counted["l2"] // 2)


def nanoseconds(sm, sms, rates, kernel, rows, gradient, N, K):
    _C.set_card_rates(sm, *rates)
    dtype = 2 if sm >= 80 else 1
    plan = _C.plan_linear_4bit(rows, N, K, dtype, sm, sms, nested=False, gradient=gradient, kernel=kernel)
    _C.set_card_rates(sm)
    return plan["ns"]


@pytest.mark.parametrize("sm, sms", CARDS)
def test_fitted_rates_predict_other_products(sm, sms):
    """A card that behaves as other rates say is found out by six products; estimates of all others follow."""
    real = other_card(sm)
    asked = []

    def timed(kernel, rows, gradient):
        asked.append((kernel, rows, gradient))
        return nanoseconds(sm, sms, real, kernel, rows, gradient, *card.SIZES)

    found = card.fitted(sm, sms, timed, real[-1])
    assert len(asked) == 6 and _C.card_rates(sm)["chosen"]
    assert _C.card_rates(sm)["flops_per_ns_sm"] * 1.4 == pytest.approx(real[0])  # set back
    rates = [found[name] for name in card.KEPT]
    for N, K in SHAPES:
        for rows in (64, 256, 2048):
            for gradient in (False, True):
                for kernel in (card.PANELS, card.one_pass(sm)):
                    product = (kernel, rows, gradient, N, K)
                    expected = nanoseconds(sm, sms, real, *product)
                    assert nanoseconds(sm, sms, rates, *product) == pytest.approx(expected, rel=0.005), product


def test_plan_follows_the_rates():
    """Where one pass was measured as slow, panels are taken."""
    counted = _C.card_rates(86)
    rates = [counted[name] for name in card.KEPT]
    assert _C.plan_linear_4bit(256, 4096, 4096, 2, 86, 82)["kernel"] == card.ONE_PASS
    rates[3] = ((0.2, 0.2), (0.2, 0.2))
    _C.set_card_rates(86, *rates)
    assert _C.plan_linear_4bit(256, 4096, 4096, 2, 86, 82)["kernel"] == card.PANELS
    assert _C.plan_linear_4bit(256, 4096, 4096, 2, 89, 82)["kernel"] == card.ONE_PASS  # another architecture
    _C.set_card_rates(89, *(_C.card_rates(89)[name] for name in card.KEPT))
    assert _C.plan_linear_4bit(256, 4096, 4096, 2, 86, 82)["kernel"] == card.PANELS  # which has rates of its own
    _C.set_card_rates(86)
    assert _C.plan_linear_4bit(256, 4096, 4096, 2, 86, 82)["kernel"] == card.ONE_PASS


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_rates(bad):
    rates = [_C.card_rates(86)[name] for name in card.KEPT]
    with pytest.raises(ValueError, match="rate 1"):
        _C.set_card_rates(86, rates[0], bad, *rates[2:])
    with pytest.raises(ValueError, match="rate 5"):
        _C.set_card_rates(86, *rates[:3], ((1.0, 1.0), (bad, 1.0)), 0)


GPU = types.SimpleNamespace(
    name="RTX of a test", major=8, minor=6, multi_processor_count=28, L2_cache_size=3 << 20, index=0
)


@pytest.fixture
def first_use(monkeypatch, tmp_path):
    """(calls of `measured`, a function that uses a GPU for the first time); its file is below tmp_path."""
    calls = []

    def measured(device):
        calls.append(device)
        counted = _C.card_rates(86)
        return {**counted, "flops_per_ns_sm": 123.0, "share": [[0.5, 0.6], [0.7, 0.8]]}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(card.VARIABLE, "1")
    monkeypatch.setattr(card, "_seen", set())
    monkeypatch.setattr(card, "measured", measured)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def use():
        _C.set_card_rates(86)
        card.at_first_use(torch.device("cuda", 0))
        return _C.card_rates(86)

    return calls, use


def test_measured_once_and_kept(first_use, tmp_path, monkeypatch):
    calls, use = first_use
    assert use()["flops_per_ns_sm"] == 123.0 and len(calls) == 1
    use()
    assert len(calls) == 1  # in this process
    monkeypatch.setattr(card, "_seen", set())
    found = use()
    assert found["flops_per_ns_sm"] == 123.0 and found["share"] == ((0.5, 0.6), (0.7, 0.8)) and len(calls) == 1
    kept = json.loads((tmp_path / "bitshard/cards.json").read_text())
    assert list(kept) == [f"RTX of a test, 28 multiprocessors, CUDA {torch.version.cuda}"]


@pytest.mark.parametrize("spoil", ["{", "[]", '{"NAME": 3}', '{"NAME": {"share": [[1]]}}', "nan"])
def test_what_cannot_be_used_is_measured_again(first_use, tmp_path, monkeypatch, spoil):
    calls, use = first_use
    use()
    file = tmp_path / "bitshard/cards.json"
    name = next(iter(json.loads(file.read_text())))
    text = file.read_text().replace("123.0", "NaN") if spoil == "nan" else spoil.replace("NAME", name)
    file.write_text(text)
    monkeypatch.setattr(card, "_seen", set())
    assert use()["flops_per_ns_sm"] == 123.0 and len(calls) == 2
    assert json.loads(file.read_text())[name]["flops_per_ns_sm"] == 123.0


def test_off_unless_asked_for(first_use, monkeypatch):
    calls, use = first_use
    monkeypatch.delenv(card.VARIABLE)
    assert use() == _C.card_rates(86) and not calls
    monkeypatch.setenv(card.VARIABLE, "1")
    monkeypatch.setattr(GPU, "major", 9)
    monkeypatch.setattr(GPU, "minor", 0)
    use()
    assert not calls  # Hopper's kernels are compared by times of their own


def test_a_folder_that_cannot_be_written(first_use, tmp_path, caplog):
    calls, use = first_use
    (tmp_path / "bitshard").write_text("a file")
    assert use()["flops_per_ns_sm"] == 123.0 and "cannot be kept" in caplog.text
