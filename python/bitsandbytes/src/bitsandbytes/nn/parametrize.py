"""4-bit parameters of modules that are not linear layers."""

from bitshard.nn.parametrize import (
    Bnb4bitParametrization,
    _disable_parametrization_cache,
    _enable_parametrization_cache,
    _parametrized_state_dict_post_hook,
    _register_parametrization_hooks,
    replace_parameter_4bit,
    replace_parameter_4bit_prequantized,
)

from .. import functional as F

__all__ = [
    "Bnb4bitParametrization",
    "F",
    "_disable_parametrization_cache",
    "_enable_parametrization_cache",
    "_parametrized_state_dict_post_hook",
    "_register_parametrization_hooks",
    "replace_parameter_4bit",
    "replace_parameter_4bit_prequantized",
]
