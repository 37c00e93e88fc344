"""The matrix of low rank that makes up best for what quantization has left, and adapters of peft with such ones."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from bitshard.convert import output

_RIDGE = 1e-4  # of H, in parts of its mean diagonal: it can then be divided by
SCALE = 2  # of an adapter, lora_alpha / r: that of most scripts for QLoRA
COLUMN = 3.2  # the norm of B's columns in an adapter, chosen by measurement: it learns no more slowly than a new one


def correction(left: Tensor, H: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """float32 A [r, K] and B [N, r] with the least tr((R - B A) H (R - B A)^T) for R = `left` [N, K].

    With H = S S^T it is the truncated singular value decomposition of R S, divided by S (as in LQER, arXiv 2402.02446,
    and QERA, arXiv 2410.06040). Both factors have equal norms.
    """
    rank = min(rank, *left.shape)
    ridge = H.clone()
    ridge.diagonal().add_(_RIDGE * H.diagonal().mean().clamp_min(1e-30))
    root, failed = torch.linalg.cholesky_ex(ridge)
    if int(failed) or not bool(torch.isfinite(root).all()):
        root = torch.eye(len(H), dtype=H.dtype, device=H.device)
    scaled = left @ root
    if scaled.shape[0] <= scaled.shape[1]:  # by the smaller Gram matrix: only the first vectors are wanted
        _, vectors = torch.linalg.eigh((scaled @ scaled.t()).double())
        b = vectors[:, -rank:].flip(1).float()
        rows = b.t() @ scaled
    else:
        _, vectors = torch.linalg.eigh((scaled.t() @ scaled).double())
        v = vectors[:, -rank:].flip(1).float()
        b, rows = scaled @ v, v.t()
    a = torch.linalg.solve_triangular(root, rows, upper=False, left=False)
    balance = (a.norm(dim=1) / b.norm(dim=0).clamp_min(1e-30)).sqrt().clamp(1e-10, 1e10)
    return (a / balance.unsqueeze(1)).contiguous(), (b * balance).contiguous()


def for_training(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A [..., r, K] and B [..., N, r] with SCALE B A equal to b a, whose B has columns of the norm COLUMN.

    What they begin with does not say how fast factors learn: Adam moves all elements at one rate, so B A moves by A in
    proportion to B, and by B in proportion to A. Rows of A are directions in which inputs are small, and move little.
    """
    norms = b.norm(dim=-2, keepdim=True)
    share = torch.where(norms > 0, norms / (SCALE * COLUMN), 1.0)
    return a * share.transpose(-1, -2), b / (SCALE * share)


def taken_for_experts(model: nn.Module, name: str) -> bool:
    """Whether peft, told to adapt a linear layer of this name, adapts stacks of experts instead.

    In mixtures of experts of some architectures transformers once had a layer "gate_proj" for each expert. For adapters
    of those days peft takes any layer of that name for experts, one of shared experts and of a dense MLP, too.
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # this peft takes names as they are
        return False
    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # it misses others that are fused with it
        return True
    return name not in config.target_modules


def _place(name: str, stacks: list[str]) -> str:
    """Where peft has the factors of a layer or stack: it wraps a module once for each of its stacks, the first one
    innermost."""
    if name not in stacks:
        return name
    module = name.rpartition(".")[0]
    beside = [other for other in stacks if other.rpartition(".")[0] == module]
    return module + ".base_layer" * (len(beside) - 1 - beside.index(name))


def save_adapter(
    folder: str | os.PathLike, base: str | os.PathLike, factors: dict[str, tuple[Tensor, Tensor]], rank: int
) -> None:
    """Write an adapter of peft.

    Args:
        folder: is made.
        base: the folder of 4-bit weights that it is for.
        factors: name of a linear layer in the model -> A [r, K], B [N, r]; of a stack of experts -> A [E, r, K],
            B [E, N, r]. Those of one experts module are in the order of its parameters.
        rank: r.
    """
    from peft import LoraConfig
    from safetensors.torch import save

    stacks = [name for name, (a, _) in factors.items() if a.dim() == 3]
    tensors = {}
    for name, (a, b) in factors.items():
        short = rank - a.shape[-2]  # layers smaller than the rank
        a, b = for_training(a, b)
        a, b = torch.nn.functional.pad(a, (0, 0, 0, short)), torch.nn.functional.pad(b, (0, short))
        if name in stacks:  # as peft keeps them: expert after expert, and with the experts innermost
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2)
        place = f"base_model.model.{_place(name, stacks)}"
        tensors[f"{place}.lora_A.weight"], tensors[f"{place}.lora_B.weight"] = a.cpu(), b.cpu()
    config = LoraConfig(
        r=rank,
        lora_alpha=SCALE * rank,
        lora_dropout=0.0,
        target_modules=sorted(set(factors) - set(stacks)),
        target_parameters=sorted(stacks) or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
        inference_mode=True,
    )
    Path(folder).mkdir(parents=True)
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    output.write_whole(Path(folder) / "adapter_model.safetensors", data)
    config.save_pretrained(folder)
