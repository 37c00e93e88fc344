"""The comparisons that other tests trust (tests/helpers): what they must tell apart, and what they must not."""

import pytest
import torch
from bitshard import _C
from helpers.alike import agree, by_isa, by_threads
from helpers.bytes import as_bytes, same, same_bytes, wrong_bytes

NAN = torch.tensor([0x7F81, 0x7FC0], dtype=torch.int16).view(torch.bfloat16)  # signalling, quiet


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "a, b, equal",
    [
        (NAN, NAN.clone(), True),
        (NAN, NAN.flip(0), False),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), False),
        (torch.zeros(2), torch.zeros(2, 1), False),
        (torch.zeros(2), torch.zeros(3), False),
        (torch.ones(2).as_subclass(Subclass), torch.ones(2), True),
        (torch.arange(6).view(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]]), True),
        (torch.zeros(0, 3), torch.zeros(0, 3), True),
    ],
)
def test_same_bytes(a, b, equal, assert_equal):
    """And `assert_equal` says the same; of NaNs, zeros, dtypes, shapes, classes, strides and nothing."""
    assert same_bytes(a, b) is equal and same_bytes(b, a) is equal
    if equal:
        assert_equal(a, b)
    else:
        with pytest.raises(AssertionError):
            assert_equal(a, b)


def test_same_looks_into_what_holds_tensors():
    def held(value):
        return {"a": [torch.tensor([value]), 1], "b": ("x", {"c": NAN})}

    assert same(held(0.0), held(0.0)) and not same(held(0.0), held(-0.0))
    for key, value in (("a", []), ("a", [torch.zeros(1), 2]), ("b", ("x", {})), ("a", [0.0, 1]), ("b", None)):
        assert not same(held(0.0), {**held(0.0), key: value})
    assert not same(held(0.0), {**held(0.0), "d": 1}) and not same(held(0.0), {"a": held(0.0)["a"]})


def test_wrong_bytes():
    """Counts single bytes in any dtype, and never finds tensors of two sizes equal."""
    words = torch.arange(1000).to(torch.float32)
    damaged = words.clone()
    damaged.view(torch.uint8)[[5, 1234]] ^= 1
    assert wrong_bytes(damaged, words) == 2 and wrong_bytes(words.view(torch.uint8), words) == 0
    assert wrong_bytes(words[:0], words) == wrong_bytes(words, words[:0]) == 4000


def test_as_bytes_is_a_copy():
    data = torch.zeros(3, dtype=torch.int16)
    as_bytes(data).fill_(7)
    assert not data.any() and as_bytes(data[1:]).tolist() == [0] * 4


def test_a_report_names_the_first_wrong_element(assert_equal):
    wrong = torch.zeros(2, 3)
    wrong[1, 0] = wrong[1, 2] = 5
    with pytest.raises(AssertionError, match=r"2 of 6 wrong, first at \(1, 0\): tensor\(5.\), expected tensor\(0.\)"):
        assert_equal(wrong, torch.zeros(2, 3))


def test_calls_on_every_instruction_set_and_number_of_threads():
    """Each call sees its own, what was set before is set again, and one wrong bit is named."""
    before = _C.isa(), torch.get_num_threads()
    assert by_isa(_C.isa) == {isa: isa for isa in _C.isas()} and "scalar" in _C.isas()
    assert by_threads(torch.get_num_threads, 1, 3) == {1: 1, 3: 3}
    with pytest.raises(ZeroDivisionError):
        by_threads(lambda: by_isa(lambda: 1 / 0), 2)
    assert before == (_C.isa(), torch.get_num_threads())
    agree({"scalar": (torch.zeros(3), torch.ones(2)), "other": [torch.zeros(3), torch.ones(2)]})
    with pytest.raises(AssertionError, match="other against scalar, result 1: 1 of 2 wrong"):
        agree({"scalar": (torch.zeros(3), torch.ones(2)), "other": (torch.zeros(3), torch.tensor([1.0, 2.0]))})
    with pytest.raises(ValueError):
        agree({"scalar": (torch.zeros(3),), "other": (torch.zeros(3), torch.zeros(3))})
