"""A 4-bit weight of which a rank keeps only its part: what reads or writes it raises, everything else passes."""

import io

import pytest
import torch
from bitshard import tensor
from bitshard.shards import kept_part
from bitshard.state import QuantState
from bitshard.weights.placeholder import PlaceholderParams4bit
from torch import Tensor

REFUSAL = "keeps only its part"


@pytest.fixture
def weight():
    """[64, 1] of bfloat16 that stands for a weight of [32, 8]."""
    state = QuantState(torch.ones(4), torch.Size((32, 8)), torch.ones(16), 64, "nf4", torch.bfloat16)
    whole = tensor.Params4bit(torch.ones(64, 1, dtype=torch.bfloat16), quant_state=state, bnb_quantized=True)
    whole.data = kept_part.hollow(whole.data, "cpu")
    whole.__class__ = PlaceholderParams4bit
    return whole


def forms_of(name):
    """The functions of torch behind an attribute of a tensor: a method, or what gets and sets it."""
    attribute = getattr(Tensor, name)
    return [attribute.__get__] if hasattr(attribute, "__get__") and not callable(attribute) else [attribute]


def told(weight, func, *args):
    """What a function of torch says of the weight: an answer, or the exception."""
    try:
        return PlaceholderParams4bit.__torch_function__(func, (PlaceholderParams4bit,), (weight, *args))
    except (
        TypeError,
        AttributeError,
        ValueError,
        RuntimeError,
        NotImplementedError,
        LookupError,
        AssertionError,
    ) as error:
        return error


def memory_in(answer):
    """Whether there are bytes behind what a function gave."""
    if isinstance(answer, (tuple, list)):
        return any(map(memory_in, answer))
    return isinstance(answer, Tensor) and not answer.is_meta and answer.untyped_storage().nbytes() > 0


ATTRIBUTES = sorted(name for name in dir(Tensor) if not callable(getattr(Tensor, name)) and name != "__dict__")
METHODS = sorted(name for name in dir(Tensor) if callable(getattr(Tensor, name)) and name not in dir(object))


def test_an_attribute_that_nobody_knows_passes(weight):
    """As torch 2.15 asks each parameter for `_has_grad_dtype_override`."""
    for name in ("_has_grad_dtype_override", "_something_of_the_next_torch"):

        class Next(Tensor):
            pass

        setattr(Next, name, property(lambda self: self.dim()))
        assert told(weight, getattr(Next, name).__get__) == 2


def test_a_method_that_nobody_knows_passes_until_it_reads(weight):
    assert told(weight, lambda self: (self.dim(), self.dtype)) == (2, torch.bfloat16)
    for reads in (lambda self: self.dim() and self + 1, lambda self: self.view(-1), lambda self: self.zero_()):
        assert REFUSAL in str(told(weight, reads))


def test_metadata_passes(weight):
    names = "device dtype shape grad is_leaf is_meta layout ndim requires_grad itemsize nbytes is_cuda _version".split()
    assert all(told(weight, getattr(Tensor, name).__get__) is not None or name == "grad" for name in names)
    for name in "dim size stride numel data_ptr is_contiguous element_size untyped_storage storage_offset".split():
        assert told(weight, getattr(Tensor, name)) is not None
    assert weight.shape == (64, 1) and weight.is_floating_point() and not weight.is_pinned()
    assert weight.is_same_size(torch.empty(64, 1)) and len(weight) == 64


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_no_attribute_gives_bytes(weight, name):
    """Attributes pass, but for those that are views: nothing that one gives has memory behind it."""
    (get,) = forms_of(name)[:1]
    answer = told(weight, get)
    assert not memory_in(answer), answer


@pytest.mark.parametrize("name", METHODS)
def test_no_method_gives_bytes(weight, name):
    """Called with the weight alone, with a number, and with a tensor: the refusal, or an answer without bytes."""
    func = getattr(Tensor, name)
    for args in ((), (1,), (torch.ones(64, 1, dtype=torch.bfloat16),)):
        answer = told(weight, func, *args)
        assert not memory_in(answer) or answer in args, (args, answer)
    with torch._C.DisableTorchFunctionSubclass():
        assert weight.untyped_storage().nbytes() == 0 and weight.shape == (64, 1)


@pytest.mark.parametrize(
    "reads",
    [
        lambda w: w + 1,
        lambda w: w.clone(),
        lambda w: w.tolist(),
        lambda w: w.sum(),
        lambda w: w.view(torch.uint8),
        lambda w: w[0],
        lambda w: w.T,
        lambda w: w.copy_(torch.ones(64, 1)),
        lambda w: w.zero_(),
        lambda w: w.numpy(),
        lambda w: w.cpu().tolist(),
        lambda w: torch.equal(w, w),
        lambda w: torch.cat([w, w]),
        lambda w: torch.save(w, io.BytesIO()),
        lambda w: torch.empty(64, 1, dtype=torch.bfloat16).copy_(w),
        lambda w: torch._foreach_copy_([w], [torch.ones(64, 1)]),
        lambda w: torch._foreach_norm([w]),
        lambda w: torch.ops.aten.add.Tensor(w, w),
        lambda w: w.to("meta"),
        lambda w: bool(w),
        lambda w: w.set_(torch.ones(64, 1, dtype=torch.bfloat16)),
        lambda w: w.resize_(2, 2),
    ],
)
def test_reading_and_writing_raise(weight, reads):
    with pytest.raises(ValueError, match=REFUSAL):
        reads(weight)
    with torch._C.DisableTorchFunctionSubclass():
        assert weight.untyped_storage().nbytes() == 0 and weight.shape == (64, 1)
