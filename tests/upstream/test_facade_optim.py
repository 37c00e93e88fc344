"""The optimizer classes of the façade: constructors, settings, bases and pickles, each class as in bitsandbytes 0.50.2.

Signatures are held to tests/original/upstream_names.json by test_facade_names.py.
"""

import inspect
import json
import re

import bitsandbytes as bnb
import pytest
import torch
from helpers import upstream
from helpers.copies import pickled
from original import upstream_classes, upstream_names

CLASSES = upstream_classes.classes()
LIST = json.loads(upstream_names.FILE.read_text(encoding="utf-8"))["modules"]


@pytest.fixture(scope="module")
def original():
    """What the original makes of the same calls, in a process of its own."""
    upstream.folder_or_skip()
    return json.loads(upstream.run(upstream_classes.__file__).splitlines()[-1])


def make(name: str, **options):
    p = torch.nn.Parameter(torch.zeros(2))
    return CLASSES[name]([p], **upstream_classes.needed(name) | options)


def test_there_are_classes():
    assert len(CLASSES) == 39


@pytest.mark.parametrize("name", CLASSES)
def test_arguments_reach_what_they_do_in_the_original(name, original):
    """Numbers, settings and errors: by default, with one argument alone, and with all by position."""
    found = upstream_classes.describe(CLASSES[name])
    assert len(found) > 25 and found == {call: original[call] for call in found}


@pytest.mark.parametrize("name", CLASSES)
def test_names_say_bits_and_paging(name):
    """Where a name fixes the bits or the paging, arguments that are taken all the same do not change it."""
    optimizer, taken = make(name), inspect.signature(CLASSES[name]).parameters
    assert optimizer.args.optim_bits == (8 if name.endswith("8bit") else 32)
    assert bool(optimizer.name2qmap) == name.endswith("8bit")
    assert optimizer.is_paged == name.startswith("Paged")
    if "32bit" in name and "optim_bits" in taken:
        assert make(name, optim_bits=8).args.optim_bits == 32
    if name.startswith("Paged") and "is_paged" in taken:
        assert make(name, is_paged=False).is_paged
    if not re.search("32bit|8bit", name):
        assert make(name, optim_bits=8).args.optim_bits == 8


@pytest.mark.parametrize("name", CLASSES)
def test_bases_are_the_originals(name):
    """No public base class more or less; private ones may stand between."""
    cls = CLASSES[name]
    bases = [base.__name__ for base in cls.__mro__[1:-1] if not base.__name__.startswith("_")]
    assert " ".join(bases) == LIST[cls.__module__][f"{name}.__mro__"]


@pytest.mark.parametrize("name", CLASSES)
def test_pickles_and_signatures_of_init(name):
    """A pickle names the class at its module; `__init__` itself has the signature of the class."""
    cls = CLASSES[name]
    assert getattr(__import__(cls.__module__, fromlist=[name]), name) is cls is getattr(bnb.optim, name)
    copied = pickled(make(name, lr=0.125))
    assert type(copied) is cls and copied.param_groups[0]["lr"] == 0.125
    of_init = str(inspect.signature(cls.__init__)).replace("(self, ", "(")
    assert of_init == str(inspect.signature(cls)) == LIST[cls.__module__][name]
    assert cls.__doc__ and cls.__init__.__name__ == "__init__"


@pytest.mark.parametrize("name", CLASSES)
def test_wrong_calls(name):
    """A TypeError that names the argument; `params` counts."""
    with pytest.raises(TypeError, match=r"__init__\(\) got an unexpected keyword argument 'learning_rate'"):
        make(name, learning_rate=1.0)
    with pytest.raises(TypeError, match=r"__init__\(\).*missing.*'params'"):
        CLASSES[name]()
    with pytest.raises(TypeError, match=r"__init__\(\).*multiple values for argument 'params'"):
        CLASSES[name]([], params=[])


def test_a_class_of_ones_own():
    """A subclass may have arguments of its own, and pass on the others."""

    class Own(bnb.optim.PagedLion8bit):
        def __init__(self, params, own, **options):
            super().__init__(params, **options)
            self.own = own

    optimizer = Own([torch.nn.Parameter(torch.zeros(2))], 3, lr=0.5)
    assert optimizer.own == 3 and optimizer.is_paged and optimizer.args.optim_bits == 8
    assert optimizer.param_groups[0]["lr"] == 0.5 and isinstance(optimizer, bnb.optim.optimizer.Optimizer8bit)
