"""What the optimizer classes make of their arguments, in the words of the package that an import finds.

Run by test_facade_optim.py with the original bitsandbytes, too.
"""

import inspect
import json
import re
from types import SimpleNamespace

import bitsandbytes as bnb
import torch

NEEDED = {"SGD": {"lr": 0.01, "momentum": 0.9}, "LARS": {"lr": 0.01, "momentum": 0.9}}
# By argument: values that no class has as its default, and that reach different places
VALUES = {
    "lr": (0.5, -1.0),
    "betas": ((0.25, 0.5), (0.25, 1.0)),
    "eps": (1e-3, -1.0),
    "weight_decay": (0.125, -1.0),
    "amsgrad": (True, 0, None),
    "optim_bits": (8, 32, 16),
    "args": (SimpleNamespace(optim_bits=8, min_8bit_size=1, max_unorm=0.0, skip_zeros=True),),
    "min_8bit_size": (17,),
    "is_paged": (True, False),
    "alpha": (0.75, 0),
    "t_alpha": (3,),
    "t_beta3": (4,),
    "momentum": (0.5, 0),
    "dampening": (0.25,),
    "nesterov": (True,),
    "centered": (True, 0),
    "bias_correction": (False,),
    "adam_w_mode": (False,),
    "max_unorm": (0.5, 1),
    "lr_decay": (0.1,),
    "initial_accumulator_value": (0.1,),
    "skip_zeros": (True,),
}


def classes() -> dict[str, type]:
    """The classes with quantized state, by name."""
    found = {name: item for name, item in vars(bnb.optim).items() if inspect.isclass(item)}
    return {name: item for name, item in found.items() if issubclass(item, bnb.optim.optimizer.Optimizer8bit)}


def needed(name: str) -> dict[str, float]:
    """Arguments without which a class is not constructed."""
    return NEEDED.get(re.sub("8bit|32bit", "", name), {})


def quiet(cls: type, **others) -> list:
    """A value for every argument after `params`, in order, that the class takes and, where it can, not its default."""
    values = {key: values[0] for key, values in VALUES.items()} | others
    values |= {"betas": (0.25, 0.5, 0.75)[: len(default(cls, "betas"))], "amsgrad": False, "centered": False}
    values |= dict.fromkeys(("lr_decay", "initial_accumulator_value"), 0)
    values |= {key: default(cls, key) for key in ("optim_bits", "max_unorm") if cls.__name__.endswith("8bit")}
    return [values[name] for name in list(inspect.signature(cls).parameters)[1:]]


def default(cls: type, name: str):
    found = inspect.signature(cls).parameters.get(name)
    return () if found is None else found.default


def made(cls: type, *arguments, **options) -> str:
    """Numbers and settings of the optimizer; or the error."""
    try:
        optimizer = cls([torch.zeros(2, requires_grad=True)], *arguments, **options)
    except TypeError as error:  # Python's, whose words differ between versions
        return f"TypeError {options.keys() if 'unexpected' in str(error) else ''}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    (group,) = optimizer.param_groups
    own = {"args": vars(optimizer.args), "paged": optimizer.is_paged, "maps": sorted(optimizer.name2qmap)}
    group = {key: value for key, value in group.items() if key != "params"}
    return json.dumps([optimizer.optimizer_name, group, own], sort_keys=True)


def describe(cls: type) -> dict[str, str]:
    """{call: what came of it}: by default, with each argument alone by its name, with all by position."""
    name, base = cls.__name__, needed(cls.__name__)
    found = {"()": made(cls, **base), "positions": made(cls, *quiet(cls)), "too many": made(cls, *quiet(cls), 1)}
    found["positions, args=None"] = made(cls, *quiet(cls, args=None))
    for key, values in VALUES.items():
        for value in values if key != "args" or key in inspect.signature(cls).parameters else ():
            found[f"{key}={value}"] = made(cls, **{**base, key: value})
    return {f"{name} {call}": result for call, result in found.items()}


if __name__ == "__main__":
    print(json.dumps({call: result for cls in classes().values() for call, result in describe(cls).items()}))
