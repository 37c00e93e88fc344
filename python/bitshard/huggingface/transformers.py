"""transformers loads 4-bit experts and quantized embeddings: a quantization config and a quantizer of its registries.

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=FourBitConfig(bnb_4bit_quant_type="nf4"))

Linear layers are as `BitsAndBytesConfig(load_in_4bit=True)` makes them. The stacks of experts modules are quantized as
they come, one after the other, files with one tensor per expert included. A model that was saved so says
"bitshard_4bit" in its config, and is read where bitshard or its bitsandbytes was imported; elsewhere transformers stops
at the unknown method.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.bitsandbytes import Bnb4bitDeserialize, Bnb4bitQuantize
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from bitshard.experts import forward, modules, sources
from bitshard.experts.sources import dense_config
from bitshard.formats.entries import BLOB_PREFIX
from bitshard.formats.kind import kind_of, quant_types
from bitshard.formats.layouts import Stacks
from bitshard.huggingface import vendor
from bitshard.nn import tied
from bitshard.nn.embedding import Embedding8bit
from bitshard.process.registry import QUANT_METHOD
from bitshard.weights import inventory
from bitshard.weights.int8_params import Int8Params
from bitshard.weights.inventory import holder_of
from bitshard.weights.tensor import Params4bit

_log = logging.getLogger("bitshard")
_ENTRIES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_ENTRIES += tuple(f"quant_state.{BLOB_PREFIX}{quant_type}" for quant_type in quant_types() if quant_type != "int8")


class FourBitConfig(BitsAndBytesConfig):
    """`BitsAndBytesConfig(load_in_4bit=True)` whose 4-bit weights are those of experts, too, and on demand embeddings.

    Args:
        bnb_4bit_blocksize: weights per block scale of experts, a power of two from 32 to 4096; None: 64, of MXFP4 32
            and of NVFP4 16, which have no other. Linear layers have 64.
        bnb_4bit_embedding_bits: 4 or 8: quantize the input embedding, to the format of the linear layers or to int8 by
            rows, and let a head that is tied to it use the same weight, which is held once. None leaves both alone.
        arguments: of BitsAndBytesConfig, with its meaning; `llm_int8_skip_modules` names experts modules as well.
    """

    files: dict[str, Any] | None = None  # what the config of the files says, where a layout of others is kept

    def __init__(
        self, bnb_4bit_blocksize: int | None = None, bnb_4bit_embedding_bits: int | None = None, **arguments: Any
    ):
        if bnb_4bit_embedding_bits not in (None, *tied.BITS):
            raise ValueError(f"bnb_4bit_embedding_bits is {bnb_4bit_embedding_bits!r}, expected 4, 8 or None")
        known = {name: value for name, value in arguments.items() if name not in ("load_in_4bit", "quant_method")}
        super().__init__(load_in_4bit=True, **known)
        kind = kind_of(self.bnb_4bit_quant_type)
        self.bnb_4bit_blocksize = kind.blocksize if bnb_4bit_blocksize is None else bnb_4bit_blocksize
        self.bnb_4bit_embedding_bits = bnb_4bit_embedding_bits
        self.quant_method = QUANT_METHOD

    @classmethod
    def of(cls, config: BitsAndBytesConfig) -> FourBitConfig:
        """The same settings with experts, of whatever files."""
        given = {name.lstrip("_"): value for name, value in vars(config).items()}
        left_out = ("load_in_8bit", "quant_method", "files")
        return cls(**{name: value for name, value in given.items() if name not in left_out})

    def to_dict(self) -> dict[str, Any]:
        """As of any config; without `load_in_4bit`, by which transformers would take it for bitsandbytes' own."""
        if self.files is not None:
            return dict(self.files)
        output = super().to_dict()
        for name in ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"):
            output.pop(name, None)
        return output


class QuantizeExperts(Bnb4bitQuantize):
    """Quantizes a stack, or the weight of a linear layer, as it comes."""

    def convert(self, input_dict: dict, full_layer_name: Any = None, model: Any = None, **others: Any) -> dict:
        done, rest = {}, {}
        for name, value in input_dict.items():
            module, leaf = get_module_from_name(model, name)
            int8 = isinstance(module, Embedding8bit)
            if not int8 and (holder_of(module, leaf) is None or not modules.is_experts(module)):
                rest[name] = value
                continue
            value = value[0] if isinstance(value, list) else value
            old = module._parameters[leaf]
            made = type(old) if int8 else Params4bit  # of a stack that torch has sharded, `old` is a DTensor
            done[name] = made(value, requires_grad=False, **old.__dict__).to(value.device)
            module._is_hf_initialized = True
        if rest:
            done.update(super().convert(rest, full_layer_name=full_layer_name, model=model, **others))
        return done


class QuantizeDecoded(QuantizeExperts):
    """Quantizes what transformers has decoded from another format, where it is a 4-bit weight here."""

    def convert(self, input_dict: dict, full_layer_name: Any = None, model: Any = None, **others: Any) -> dict:
        if len(input_dict) != 1 or not self.hf_quantizer.param_needs_quantization(model, full_layer_name):
            return input_dict
        values = {full_layer_name: next(iter(input_dict.values()))}
        return super().convert(values, full_layer_name=full_layer_name, model=model, **others)


class DeserializeExperts(ConversionOps):
    """Makes a stack of its packed bytes and the entries beside them."""

    def __init__(self, hf_quantizer: Any):
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: dict, model: Any = None, full_layer_name: Any = None, **others: Any) -> dict:
        given = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        module, leaf = get_module_from_name(model, full_layer_name)
        held = holder_of(module, leaf)
        key = next(name for name in given if name.rstrip("$").endswith(leaf))
        packed = given.pop(key)
        entries = {name.partition(f"{leaf}.")[2]: value for name, value in given.items()}
        new = Params4bit.from_prequantized(packed, entries, device=packed.device, module=held.layer)
        module._is_hf_initialized = True
        return {full_layer_name: new}


class DeserializeInt8(ConversionOps):
    """Makes the int8 weight of an embedding of its codes and the scales beside them."""

    def __init__(self, hf_quantizer: Any):
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: dict, model: Any = None, full_layer_name: Any = None, **others: Any) -> dict:
        given = {name.rstrip("$").rpartition(".")[2]: value for name, value in input_dict.items()}
        entries = {name: value[0] if isinstance(value, list) else value for name, value in given.items()}
        codes, scales = entries.get("weight"), entries.get("SCB")
        module, _ = get_module_from_name(model, full_layer_name)
        module.packed_weight.check_codes(codes, scales)
        module._is_hf_initialized = True
        return {full_layer_name: Int8Params(codes, requires_grad=False, SCB=scales)}


class FourBitQuantizer(Bnb4BitHfQuantizer):
    """The quantizer of 4-bit linear layers, of experts, and of embeddings."""

    # Of every format here. transformers takes the first that a name has, so the weight itself comes last.
    serialized_names = {"weight": [*(f"weight.{entry}" for entry in _ENTRIES), "weight"]}
    _stacks: list[str] = []  # of the model that is being loaded, as `_stack_patterns` gives them
    _embedding: str | None = None  # path of its quantized embedding
    _source: Any = None  # transformers' quantizer that reads the files, where these are of another format
    vendor: vendor.Vendor | None = None  # the files, where these are packed in the wanted format by others

    def param_needs_quantization(self, model: Any, param_name: str, **others: Any) -> bool:
        """Whether a parameter is a 4-bit weight that comes in 16 or 32 bits."""
        module, leaf = get_module_from_name(model, param_name)
        if isinstance(module, Embedding8bit):
            return leaf == "weight"
        return holder_of(module, leaf) is not None or super().param_needs_quantization(model, param_name, **others)

    def get_weight_conversions(self) -> list:
        """How packed weights of linear layers are read."""
        names = self.serialized_names["weight"]
        return [WeightConverter(names, "weight", [Bnb4bitDeserialize(self)])] if self.pre_quantized else []

    def get_modules_to_not_convert(self, model: Any, *others: Any, **settings: Any) -> list[str]:
        """transformers' list, and of files that others have packed each layer of which they have 16 bits."""
        found = super().get_modules_to_not_convert(model, *others, **settings)
        return found if self.vendor is None else [*found, *self.vendor.left_alone(model)]

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, str]]:
        """What `save_pretrained` writes: packed weights in the layout of the files that they came from."""
        if not any(held.layout is not None for module in model.modules() for held in inventory.held_by(module)):
            return super().get_state_dict_and_metadata(model)
        vendor.write_small_files(model)
        return vendor.filed(model, model.state_dict()), {}

    def get_quantize_ops(self) -> Any:
        """What quantizes a parameter."""
        return QuantizeExperts(self)

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any = None, checkpoint_files: Any = None, **others: Any
    ) -> Any:
        others["checkpoint_files"] = checkpoint_files
        if not self.pre_quantized:
            self.vendor = vendor.vendor_of(checkpoint_files or (), self.quantization_config.bnb_4bit_quant_type, model)
        if self.vendor is not None:
            _require_embedding_alone(self.quantization_config, self.vendor)
            _require_whole_stacks(getattr(model.config, "distributed_config", None), self.vendor)
        out = super()._process_model_before_weight_loading(model, device_map=device_map, **others)
        config = self.quantization_config
        packed_files = self.pre_quantized
        foreign = not packed_files and self.vendor is None
        self._source = sources.quantizer_of(checkpoint_files or ()) if foreign else None
        # transformers casts what it quantizes to the model's dtype first, scales too, where files are not "quantized"
        self.pre_quantized = packed_files or self.vendor is not None or sources.has_float_scales(self._source)
        found = [
            (path, module)
            for path, module in modules.found(model)
            if should_convert_module(path, self.modules_to_not_convert)
        ]
        if found:
            _check_plan(getattr(model.config, "distributed_config", None))
            _say_who_quantizes(len(found))
        for path, module in found:
            modules.pack(
                module,
                path,
                quant_type=config.bnb_4bit_quant_type,
                quant_storage=config.bnb_4bit_quant_storage,
                compress_statistics=config.bnb_4bit_use_double_quant,
                blocksize=getattr(config, "bnb_4bit_blocksize", None),
                compute_dtype=config.bnb_4bit_compute_dtype,
                packed_files=packed_files,
            )
            module.config._experts_implementation = forward.IMPLEMENTATION
        self._stacks = _stack_patterns(model)
        self._embedding = None
        if getattr(config, "bnb_4bit_embedding_bits", None) is not None:
            self._embedding = tied.quantize_embeddings(
                model,
                config.bnb_4bit_embedding_bits,
                quant_type=config.bnb_4bit_quant_type,
                quant_storage=config.bnb_4bit_quant_storage,
                compress_statistics=config.bnb_4bit_use_double_quant,
                packed_files=packed_files,
                untied=_has_own_head(model, checkpoint_files or ()),
            )
        if found:
            forward.register()
            if not isinstance(config, FourBitConfig):  # what is saved must say so
                self.quantization_config = FourBitConfig.of(config)
        if self.vendor is not None:
            self.quantization_config = FourBitConfig.of(self.quantization_config)
            self.quantization_config.files = self.vendor.config
        return out

    def update_weight_conversions(self, weight_conversions: list, *others: Any) -> list:
        """transformers' conversions, and of files with packed stacks how these are read."""
        if self._source is not None:
            updated = self._source.update_weight_conversions(weight_conversions, *others)
            for conversion in filter(sources.converts, updated) if self.pre_quantized else ():
                conversion.operations = [*conversion.operations, QuantizeDecoded(self)]
            return updated
        if self.vendor is not None:
            made = self._stacks if self.vendor.layout.kind.stacked else []
            others = [each for each in weight_conversions if not _makes(each, made)]
            return self.vendor.converters(self._stacks, self, others)
        updated = super().update_weight_conversions(weight_conversions, *others)
        if not self.pre_quantized:
            return updated
        kept = [each for each in updated if not _makes(each, self._stacks)]
        if self.quantization_config.bnb_4bit_embedding_bits == 8 and self._embedding is not None:
            names = [f"{self._embedding}.SCB", f"{self._embedding}.weight_format", f"{self._embedding}.weight$"]
            kept.insert(0, WeightConverter(names, f"{self._embedding}.weight", [DeserializeInt8(self)]))
        return [*(self._deserializer(name) for name in self._stacks), *kept]

    def _deserializer(self, name: str) -> WeightConverter:
        sources = [*(f"{name}.{entry}" for entry in _ENTRIES), f"{name}$"]
        return WeightConverter(sources, name, [DeserializeExperts(self)])

    def reversible(self, conversions: list) -> list:
        """Those of transformers' conversions that saving reverses: of packed or decoded weights nothing can be."""
        kept = [each for each in conversions if not _makes(each, self._stacks)]
        own = (vendor.KeepPacked, vendor.KeepStacks)
        kept = [each for each in kept if not any(isinstance(op, own) for op in _operations(each))]
        dense = [op.dense for each in conversions for op in _operations(each) if getattr(op, "used", False)]
        return [*(each for each in kept if not sources.converts(each)), *dense]

    def _process_model_after_weight_loading(self, model: Any, **others: Any) -> Any:
        used = getattr(model, "_weight_conversions", None)
        if used is not None:
            model._weight_conversions = self.reversible(used)
        for path, module in modules.found(model):
            for held in inventory.held_by(module):
                if held.state is None:
                    raise ValueError(
                        f"{path}.{held.name}: the files have brought no 4-bit stack of {list(held.shown)} and no float "
                        "one that could become one: what is there now is not quantized"
                    )
        if self._embedding is not None:
            tied.check_loaded(model, self._embedding)
        return super()._process_model_after_weight_loading(model, **others)

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        tied.restore_embeddings(model)
        return super()._dequantize(model, dtype=dtype)


def _require_whole_stacks(distributed: Any, files: vendor.Vendor) -> None:
    """ValueError where transformers would give each rank rows of what has none, the global scales of experts."""
    ranks = getattr(distributed, "fsdp_size", None) or 1
    found = [key for key, (layout, _) in files.packed.items() if isinstance(layout, Stacks)]
    if ranks > 1 and found:
        raise ValueError(
            f"DistributedConfig(fsdp_size={ranks}): transformers cannot shard while it reads them packed experts that "
            f"the files have one by one ({found[0]} and {len(found) - 1} more): use bitshard.fsdp.load, or "
            "from_pretrained without it and fully_shard"
        )


def _require_embedding_alone(config: Any, files: vendor.Vendor) -> None:
    """ValueError where an embedding is to be quantized, of which the config of files packed by others says nothing."""
    bits = getattr(config, "bnb_4bit_embedding_bits", None)
    if bits is not None:
        raise ValueError(
            f"bnb_4bit_embedding_bits={bits}: the files are in a layout of {files.layout.method}, whose config, which "
            "is kept, has no word for a quantized embedding; leave it out"
        )


def _has_own_head(model: Any, files: Iterable[str]) -> bool:
    """Whether safetensors files have, beside the embedding, another head than it for a model that ties them."""
    from safetensors import safe_open

    places: dict[str, Any] = {}
    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                places |= dict.fromkeys(opened.keys(), file)

    def read(name: str) -> torch.Tensor:
        with safe_open(places[name], framework="pt") as opened:
            return opened.get_tensor(name)

    pairs = [pair for pair in model.all_tied_weights_keys.items() if places.keys() >= set(pair)]
    return any(not torch.equal(read(head), read(source)) for head, source in pairs)


def _check_plan(distributed: Any) -> None:
    """ValueError where a DistributedConfig splits the experts of a layer among ranks (expert or tensor parallelism)."""
    for size in ("ep_size", "tp_size"):
        ranks = getattr(distributed, size, None) or 1
        if ranks > 1:
            raise ValueError(
                f"DistributedConfig({size}={ranks}): 4-bit experts are sharded by FSDP2 (fsdp_size), not by expert or "
                f"tensor parallelism; leave {size} out, or name the experts in llm_int8_skip_modules"
            )


def _say_who_quantizes(count: int) -> None:
    """One line where axolotl would quantize the same experts: it takes dense stacks only, and finds none."""
    theirs = sys.modules.get("axolotl.monkeypatch.moe_quant")
    if getattr(theirs, "_moe_load_state", {}).get("patched"):
        _log.warning(
            f"axolotl's quantize_moe_experts is on, and bitshard's 4-bit experts too: bitshard quantizes the stacks of "
            f"these {count} modules, and axolotl finds none left (bitshard.experts.disable() leaves them to axolotl)"
        )


def _stack_patterns(model: Any) -> list[str]:
    """The last two parts of the names of all packed stacks, each once: "experts.down_proj"."""
    found = {}
    for path, module in modules.found(model):
        if isinstance(module, modules.PackedExperts):
            found.update(dict.fromkeys(f"{path.rpartition('.')[2]}.{name}" for name in module.packed_stacks))
    return list(found)


def _operations(conversion: Any) -> list:
    return getattr(conversion, "operations", None) or []


def _makes(conversion: Any, names: list[str]) -> bool:
    """Whether a conversion of transformers makes one of these."""
    targets = getattr(conversion, "target_patterns", ())
    return isinstance(conversion, WeightConverter) and any(
        target.rstrip("$").endswith(name) for target in targets for name in names
    )


forward.register()

__all__ = ["FourBitConfig", "FourBitQuantizer", "dense_config"]
