"""Every way of peft to put adapters around a model, with random values in them."""

import contextlib
import copy
import re

import peft
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

SOME_TOKENS = [4, 11, 81]  # that `tiny.inputs` has
STRENGTH = 0.3  # standard deviation of what is added to each trained tensor


def linears(model):
    """Names of the first two and last two linear layers that are no head; of a model inside of others the text's."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    every = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and module is not head
    ]
    found = [name for name in every if not re.search(r"vision|visual|audio|image|speech|sam_", name)] or every
    if not found:
        raise ValueError("the model has no linear layer")
    chosen = found[:2] + found[-2:]
    gates = [name.replace("up_proj", "gate_proj") for name in chosen]  # peft takes both or none where they are fused
    return [name for name in found if name in chosen or name in gates]


def last_linear(model):
    """The name of the last of them."""
    return linears(model)[-1]


def _name_of(model, module, what):
    found = next((name for name, one in model.named_modules() if one is module and module is not None), None)
    if found is None:
        raise ValueError(f"the model has no {what}")
    return found


def embedding(model):
    """The name of the embedding of tokens."""
    return _name_of(model, model.get_input_embeddings(), "embedding of tokens")


def used_embedding(model):
    """The name of the embedding that is called: an encoder's own where the model's is shared and never called."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    with contextlib.suppress(AttributeError, NotImplementedError):
        if isinstance(encoder.get_input_embeddings(), nn.Embedding):
            return _name_of(model, encoder.get_input_embeddings(), "embedding of tokens")
    return embedding(model)


def head(model):
    """The name of the layer that gives logits of tokens."""
    return _name_of(model, model.get_output_embeddings(), "head")


@torch.no_grad()
def randomize(model):
    """Add noise to all that is trained."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.add_(STRENGTH * torch.randn_like(parameter))
    return model


def _wrap(config, adapters=1):
    def wrap(model):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        settings = config(model)
        found = peft.get_peft_model(model, settings)
        for i in range(1, adapters):
            found.add_adapter(f"more{i}", copy.deepcopy(settings))
        if adapters > 1:
            found.base_model.set_adapter(["default", *(f"more{i}" for i in range(1, adapters))])
        return randomize(found)

    return wrap


def _lora(**options):
    return _wrap(lambda model: peft.LoraConfig(**{"r": 4, "target_modules": linears(model), **options}))


def _lora_at(places, **options):
    """LoRA at places that the model names."""
    return _wrap(lambda model: peft.LoraConfig(r=4, target_modules=[place(model) for place in places], **options))


def _saved(place, **options):
    return _wrap(
        lambda model: peft.LoraConfig(
            r=4, target_modules=linears(model), modules_to_save=[place(model).rpartition(".")[2]], **options
        )
    )


def _tokens(**options):
    def config(model):
        name = embedding(model).rpartition(".")[2]
        return peft.LoraConfig(
            r=4, target_modules=linears(model), trainable_token_indices={name: SOME_TOKENS}, **options
        )

    return _wrap(config)


def _parameters(model):
    """The first stack of experts' weights, or else the weight of a linear layer."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3 and "expert" in name:
            return peft.LoraConfig(r=4, target_modules=[], target_parameters=[name])
    return peft.LoraConfig(r=4, target_modules=[], target_parameters=[f"{linears(model)[0]}.weight"])


def _injected(model):
    """As transformers' `add_adapter` does: the model's class stays."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=linears(model)))
    return randomize(model)


def _replicated(model):
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], layer_replication=[[0, 2], [1, 2]])


# what a tuner needs beside the layers that it adapts
_OPTIONS = {
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 10},
    "BOFT": {"boft_block_size": 4, "boft_n_butterfly_factor": 1},
    "C3A": {"block_size": 8},
    "FOURIERFT": {"n_frequency": 20},
    "IA3": {"feedforward_modules": []},
    "OFT": {"r": 0, "oft_block_size": 8},
    "ROAD": {"group_size": 8},
    "VBLORA": {"num_vectors": 8, "vector_length": 8, "topk": 2},
    "WAVEFT": {"n_frequency": 20},
}
_PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE", "MULTITASK_PROMPT_TUNING")


def _tuner(kind, made):
    options = {"target_modules", "r"} & set(made.__dataclass_fields__)

    def config(model):
        known = {"r": 4} if "r" in options else {}
        if kind == "MULTITASK_PROMPT_TUNING":
            return made(task_type="CAUSAL_LM", num_virtual_tokens=4, num_tasks=2)
        if kind in _PROMPTS:
            return made(task_type="CAUSAL_LM", num_virtual_tokens=4)
        if kind == "ADAPTION_PROMPT":
            return made(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1)
        if kind == "LN_TUNING":
            norms = [name for name, module in model.named_modules() if "norm" in type(module).__name__.lower()]
            return made(target_modules=norms[:3])
        if kind == "TRAINABLE_TOKENS":
            return made(target_modules=[embedding(model)], token_indices=SOME_TOKENS)
        return made(**{"target_modules": linears(model), **known, **_OPTIONS.get(kind, {})})

    return _wrap(config)


LORA = {
    "lora": _lora(),
    "lora all-linear": _lora(target_modules="all-linear"),
    "lora embedding": _lora_at([used_embedding]),
    "lora head": _lora_at([head]),
    "lora embedding and head": _lora_at([used_embedding, head]),
    "lora ties embedding and head": _lora_at([used_embedding], ensure_weight_tying=True),
    "modules_to_save embedding": _saved(embedding),
    "modules_to_save head": _saved(head),
    "modules_to_save ties": _saved(embedding, ensure_weight_tying=True),
    "trainable_token_indices": _tokens(),
    "trainable_token_indices ties": _tokens(ensure_weight_tying=True),
    "lora second": _lora_at([last_linear]),
    "target_parameters": _wrap(_parameters),
    "layer_replication": _wrap(_replicated),
    "dora": _lora(use_dora=True),
    "rslora": _lora(use_rslora=True, lora_alpha=3),
    "lora_bias": _lora(lora_bias=True),
    "lora bias=all": _lora(bias="all"),
    "lora twice": _wrap(lambda model: peft.LoraConfig(r=4, target_modules=linears(model)), adapters=2),
    "add_adapter": _injected,
}
TUNERS = {
    kind.value.lower(): _tuner(kind.value, made)
    for kind, made in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    if kind.value not in ("LORA",)
}
# those that peft cannot put around a 4-bit layer
DENSE_ONLY = {
    "deft",
    "delora",
    "frod",
    "glora",
    "hra",
    "loha",
    "lokr",
    "osf",
    "peanut",
    "psoft",
    "supertuning",
    "tinylora",
}
DENSE_ONLY = DENSE_ONLY & set(TUNERS)
WRAPPERS = {**LORA, **TUNERS}
OF_TASKS = {"POLY", "MULTITASK_PROMPT_TUNING"}  # whose forward asks for the number of a task
CHANGES_BASE = {"layer_replication", "lora bias=all"}


def adapted_paths(model):
    """Names in the base of the modules, or parameters, that have adapters around them."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = set()
    for name, module in inside.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            found.add(name.replace(".base_layer", "").replace(".token_adapter", "").partition(".modules_to_save")[0])
    trained = {name for name, parameter in inside.named_parameters() if parameter.requires_grad}
    return sorted(found | {name.replace(".base_layer", "") for name in trained})
