"""A head that is tied to a quantized embedding, and models of transformers whose embedding becomes one.

The weight [N, K] is held once, by the embedding: the head computes y = x W^T with it and has no parameter of its own.
State dicts and files hold the embedding's entries only.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bitshard.formats.place import Place
from bitshard.nn.embedding import Embedding4bit, Embedding8bit
from bitshard.process.recognized import OfBitsandbytes

logger = logging.getLogger("bitshard")
BITS = (4, 8)


class TiedHead(nn.Module, OfBitsandbytes):
    """y [..., N] = x W^T + bias with the weight of a quantized embedding.

    Under FSDP2 embedding and head must be in one unit (`fully_shard([embedding, head])`, or the root's): ValueError in
    a forward that finds the weight sharded.

    Args:
        embedding: an `Embedding4bit` or `Embedding8bit` of shape [N, K].
        bias: parameter [N] or None.
    """

    def __init__(self, embedding: Embedding4bit | Embedding8bit, bias: nn.Parameter | None = None):
        super().__init__()
        self.tied = (embedding,)  # in a tuple, for the embedding is no child of the head
        self.register_parameter("bias", bias)

    @property
    def embedding(self) -> Embedding4bit | Embedding8bit:
        """The embedding that has the weight."""
        return self.tied[0]

    @property
    def weight(self) -> Tensor:
        """The embedding's weight; packed."""
        return self.embedding.weight

    @property
    def in_features(self) -> int:
        """K."""
        return self.embedding.embedding_dim

    @property
    def out_features(self) -> int:
        """N."""
        return self.embedding.num_embeddings

    def __setattr__(self, name: str, value: Any) -> None:
        """`head.weight = embedding.weight`, as transformers ties weights, changes nothing; ValueError for another."""
        if name == "weight":
            if value is not self.embedding.weight:
                raise ValueError(
                    f"this head has the weight of its embedding {[self.out_features, self.in_features]}, and cannot be "
                    "given another"
                )
            return
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K], float32, float16 or bfloat16 -> y [..., N] of its dtype and device."""
        embedding = self.embedding
        held = vars(embedding).get("packed_weight")
        if held is not None and held.place is Place.SHARD:
            raise ValueError(
                f"the head is tied to an embedding {[self.out_features, self.in_features]} that FSDP2 has sharded "
                "again before the head was called: put both into one unit, fully_shard([embedding, head], "
                "reshard_after_forward=False), or leave both to the unit of the whole model"
            )
        device = embedding.weight.device  # not that of x where accelerate has put the head elsewhere
        bias = None if self.bias is None else self.bias.to(device, x.dtype)
        return embedding.linear(x.to(device), bias).to(x.device)

    def extra_repr(self) -> str:
        """Sizes, as nn.Linear prints them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


# ---- models of transformers ----


def quantize_embeddings(
    model: nn.Module,
    bits: int,
    *,
    quant_type: str = "nf4",
    quant_storage: torch.dtype = torch.uint8,
    compress_statistics: bool = False,
    packed_files: bool = False,
    untied: bool = False,
) -> str:
    """Put a quantized embedding, and where the model ties it a `TiedHead`, into a model on the meta device.

    Args:
        model: of transformers.
        bits: 4 or 8 of a weight.
        quant_type, quant_storage, compress_statistics: of 4 bits.
        packed_files: what will be loaded is packed already, and must not be cast.
        untied: the files have a head of their own: leave it as it is, whatever the config says.

    Returns:
        the path of the embedding.

    ValueError where the embedding is no plain nn.Embedding, or others than one linear head share its weight.
    """
    old, head = model.get_input_embeddings(), model.get_output_embeddings()
    path, head_path = (_path(model, module) for module in (old, head))
    if type(old) is not nn.Embedding or old.max_norm is not None:
        raise ValueError(
            f"{path}: embeddings of {type(old).__name__}{'' if old.max_norm is None else ' with max_norm'} cannot be "
            "quantized, nn.Embedding without max_norm can: leave bnb_4bit_embedding_bits out"
        )
    sharing = [name for name, source in model.all_tied_weights_keys.items() if source == f"{path}.weight"]
    if sharing not in ([], [f"{head_path}.weight"]) or (sharing and type(head) is not nn.Linear):
        raise ValueError(
            f"{path}: {sharing} share its weight, which can be quantized for the embedding and one nn.Linear only: "
            "leave bnb_4bit_embedding_bits out"
        )
    shape, options = (old.num_embeddings, old.embedding_dim), {"dtype": old.weight.dtype, "device": "meta"}
    if bits == 4:
        new = Embedding4bit(*shape, quant_type=quant_type, quant_storage=quant_storage, **options)
        new.compress_statistics = new.weight.compress_statistics = compress_statistics
    else:
        new = Embedding8bit(*shape, **options)
    if packed_files:
        new.weight.data = new.weight.data.to(quant_storage if bits == 4 else torch.int8)
    new.padding_idx, new.source_cls = old.padding_idx, type(old)
    model.set_submodule(path, new.requires_grad_(False))
    if sharing and not untied:
        model.set_submodule(head_path, TiedHead(new, head.bias))
        del model.all_tied_weights_keys[f"{head_path}.weight"]  # by which transformers compares packed bytes as numbers
    else:
        logger.info("%s is quantized to %d bits; the head is not tied to it, and stays as it is", path, bits)
    model.resize_token_embeddings = _refuse_resizing
    return path


def _refuse_resizing(*args: Any, **options: Any) -> NoReturn:
    raise ValueError(
        "resize_token_embeddings: the embedding is quantized. Resize the model in 16 bits, save it, and load that with "
        "bnb_4bit_embedding_bits"
    )


def restore_embeddings(model: nn.Module) -> None:
    """Undo `quantize_embeddings`: a dense embedding of the quantized values, and a dense head that shares them."""
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if not isinstance(module, (Embedding4bit, Embedding8bit)):
            continue
        values = module.dequantize()
        dense = nn.Embedding(*values.shape, _weight=values, _freeze=True, padding_idx=module.padding_idx)
        model.set_submodule(path, dense)
        for name, head in modules.items():
            if isinstance(head, TiedHead) and head.embedding is module:
                new = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
                new.weight, new.bias = dense.weight, head.bias
                model.set_submodule(name, new)
    vars(model).pop("resize_token_embeddings", None)


def check_loaded(model: nn.Module, path: str) -> None:
    """ValueError unless the embedding at `path` is quantized."""
    weight = model.get_submodule(path).weight
    if not getattr(weight, "bnb_quantized", False):
        raise ValueError(
            f"{path}.weight: the files have brought no quantized embedding and no float one that could become one"
        )


def _path(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((path for path, module in model.named_modules() if module is wanted), None)
