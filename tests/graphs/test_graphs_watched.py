"""What of a model is compared in each call with the time when its graphs were recorded (bitshard.graphs.watched)."""

import pytest
import torch
from bitshard import _C

STATES = {
    "mode": lambda m: m.inner.eval(),
    "a module": lambda m: setattr(m, "more", torch.nn.Identity()),
    "another module": lambda m: setattr(m, "inner", torch.nn.Linear(2, 2)),
    "a parameter": lambda m: setattr(m.inner, "weight", torch.nn.Parameter(torch.ones(2, 2))),
    "no bias": lambda m: setattr(m.inner, "bias", None),
    "values elsewhere": lambda m: setattr(m.inner.weight, "data", torch.ones(2, 2)),
    "frozen": lambda m: m.inner.weight.requires_grad_(False),
    "a buffer": lambda m: setattr(m, "count", torch.ones(3)),
    "a new buffer": lambda m: m.register_buffer("other", torch.ones(3)),
    "a hook": lambda m: m.inner.register_forward_hook(print),
    "a float": lambda m: setattr(m, "alpha", 2.0),
    "an int": lambda m: setattr(m.inner, "in_features", 3),
    "a bool": lambda m: setattr(m, "flag", False),
    "a text": lambda m: setattr(m, "mode", "b"),
    "None for a number": lambda m: setattr(m, "alpha", None),
    "another attribute": lambda m: setattr(m, "beta", 0),
    "a hook before": lambda m: m.register_forward_pre_hook(print),
    "a hook in the backward": lambda m: m.register_full_backward_hook(print),
}


@pytest.mark.parametrize("name", STATES)
def test_what_is_compared(name):
    model = torch.nn.Module()
    model.inner = torch.nn.Linear(2, 2)
    model.register_buffer("count", torch.zeros(3))
    model.alpha, model.flag, model.mode = 1.0, True, "a"

    def states():
        return _C.module_states([vars(module) for module in model.modules()])

    before = states()
    model.inner.weight.data.add_(1)
    model.count.add_(1)
    assert states() == before
    STATES[name](model)
    assert states() != before


def test_the_same_hook_again():
    """transformers' trainers let the embeddings want a gradient in each step, by one more hook each."""
    model = torch.nn.Linear(2, 2)

    def make_inputs_require_grads(module, given, output):
        output.requires_grad_(True)

    before = _C.module_states([vars(model)])
    model.register_forward_hook(make_inputs_require_grads)
    once = _C.module_states([vars(model)])
    model.register_forward_hook(make_inputs_require_grads)
    assert before != once == _C.module_states([vars(model)])
    model.register_forward_hook(print)
    assert _C.module_states([vars(model)]) != once


def test_states_of_what_is_no_module():
    with pytest.raises(TypeError, match="no list"):
        _C.module_states(())
    with pytest.raises(TypeError, match="element 1 is no dictionary"):
        _C.module_states([vars(torch.nn.Identity()), torch.nn.Identity()])
    with pytest.raises(KeyError, match="training"):
        _C.module_states([{}])
    assert _C.module_states([]) == b""
