"""What stands in transformers' registries for `bitshard.transformers`, which is imported when one of it is called."""

from __future__ import annotations

from typing import Any

from bitshard.process import registry
from bitshard.process.registry import Entries


class _Config:
    """Stands in the registry of configs for `bitshard.transformers.FourBitConfig`."""

    @staticmethod
    def from_dict(given: dict[str, Any], **others: Any) -> Any:
        """The config of a model's config.json."""
        from bitshard.huggingface.transformers import FourBitConfig

        return FourBitConfig.from_dict(given, **others)


def _quantizer(config: Any, **arguments: Any) -> Any:
    """Stands in the registry of quantizers for `bitshard.transformers.FourBitQuantizer`."""
    from bitshard.huggingface.transformers import FourBitConfig, FourBitQuantizer

    if type(config).__name__ == "Mxfp4Config":
        if config.dequantize:
            return registry.stock("mxfp4")(config, **arguments)
        config = FourBitConfig(bnb_4bit_quant_type="mxfp4")
        config.bnb_4bit_compute_dtype = None  # that of what comes
        arguments["pre_quantized"] = False  # in bitshard's own layout
    return FourBitQuantizer(config, **arguments)


ENTRIES = Entries(_Config, _quantizer)
