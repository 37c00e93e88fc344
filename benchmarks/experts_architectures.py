"""Every model of the installed transformers that uses its experts interface: does it run with experts in 4 bits?

    python benchmarks/experts_architectures.py [--only NAME] [--out FILE.md]

A tiny model of each is made from its config class, and its experts are quantized (`bitshard.experts.quantize`). Its
loss and logits are compared with those of the model with decoded experts. Of a model that cannot be made small by these
rules, or that needs more than tokens, the experts module alone is tried. What cannot be tried is left out, with the
reason.
"""

import argparse
import copy
import importlib
import inspect
import os
import re
import sys
import warnings
from pathlib import Path

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers
from bitshard import experts, functional
from bitshard.experts import modules
from bitshard.weights import inventory

ROOT = Path(transformers.__file__).parent / "models"
LARGEST = 40_000_000  # parameters of a tiny model
LENGTH, VOCABULARY = 16, 128
# What makes a config small, by the names of its settings. A number in a config that is none of these stays as it is.
SIZES = {
    r"hidden_size|d_model|n_embd": 64,
    r"(.*_)?(intermediate|ffn_hidden)_size|d_ff|intermediate_dim|.*shared_expert.*_size": 96,
    r"num_hidden_layers|n_layers|num_layers": 2,
    r"num_attention_heads|n_heads|num_key_value_heads|num_heads|.*_num_(attention|key_value)_heads": 4,
    r"linear_num_(key|value)_heads|mamba_(num|n)_heads": 4,
    r"(.*_)?head_dim|mamba_d_head": 16,
    r"vocab_size.*": VOCABULARY,
    r"num_local_experts|num_experts|n_routed_experts|moe_num_experts": 4,
    r"num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_experts_per_token": 2,
    r"n_group|topk_group|n_shared_experts|num_shared_experts|moe_num_shared_experts": 1,
    r"q_lora_rank|kv_lora_rank": 32,
    r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim": 16,
    r"mamba_d_state|ssm_state_size|mamba_n_groups|n_groups": 16,
    r"max_position_embeddings": 256,
    r"first_k_dense_replace|num_dense_layers|num_nextn_predict_layers|moe_layer_start_index": 0,
}
ABSENT = r"num_experts|n_routed_experts|top_k_experts|(moe|expert)_intermediate_size"  # None in some default configs
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")  # of one entry a layer
TOKENS = (r"(pad|bos|eos|image|video|audio|vision|boi|eoi).*token.*", r".*_token_id|.*_token_index")


def found():
    """{folder: (classes of experts, models that use them)} of transformers."""
    result = {}
    for path in sorted(ROOT.glob("*/modeling_*.py")):
        if "use_experts_implementation" not in path.read_text(encoding="utf-8"):
            continue
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        own = [c for _, c in inspect.getmembers(importlib.import_module(name), inspect.isclass) if c.__module__ == name]
        models = [c for c in own if issubclass(c, transformers.PreTrainedModel) and getattr(c, "config_class", None)]
        heads = [c for c in models if c.__name__.endswith("ForCausalLM")] or [
            c for c in models if re.search(r"For(ConditionalGeneration|TokenClassification)$", c.__name__)
        ]
        result[path.parent.name] = ([c.__name__ for c in own if hasattr(c, "_apply_gate")], heads or models[-1:])
    return result


def shrink(config):
    """Make a config and those inside it small, by the names of their settings."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value)
        elif type(value) is int and any(re.fullmatch(pattern, name) for pattern in TOKENS):
            setattr(config, name, min(value, 3) if value >= 0 else value)
        elif type(value) is int or (value is None and re.fullmatch(ABSENT, name)):
            size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), None)
            if size is not None:
                setattr(config, name, size)
        elif (
            isinstance(value, list)
            and len(value) > 2
            and name in ("layer_types", "mlp_layer_types", "layers_block_type")
        ):
            setattr(config, name, value[-2:])
    return config


def make(model):
    """A tiny model, or RuntimeError that says why there is none."""
    torch.manual_seed(0)
    config = shrink(model.config_class())
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and len(kinds) != getattr(config, "num_hidden_layers", len(kinds)):
            setattr(config, name, (kinds * 2)[: config.num_hidden_layers])
    with torch.device("meta"):
        size = sum(p.numel() for p in model(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise RuntimeError(f"not made small: {size:,} parameters")
    made = model(config).eval()
    with torch.no_grad():
        for _, module in modules.found(made):
            for parameter in module.parameters():
                parameter.normal_(0, 0.1)
    return made


def decoded(dense, quantized):
    for (_, mine), (_, theirs) in zip(modules.found(dense), modules.found(quantized), strict=True):
        for name, held in theirs.packed_stacks.items():
            values = functional.dequantize_4bit(theirs._parameters[name].data, held.state)
            mine._parameters[name].data = held.oriented(values)
    return dense


def run(model):
    """(logits, loss) of a few tokens."""
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % (VOCABULARY - 8) + 4
    out = model(input_ids=tokens, labels=tokens)
    logits = out.logits if hasattr(out, "logits") else out[0]
    return logits.float(), None if out.loss is None else out.loss.item()


def tried(model):
    """One line about a model."""
    dense = make(model)
    if not list(modules.found(dense)):
        return "left out", "this tiny config has no experts"
    with torch.no_grad():
        run(dense)
    quantized = copy.deepcopy(dense)
    stacks = experts.quantize(quantized)
    reference = decoded(copy.deepcopy(dense), quantized)
    with torch.no_grad():
        (y, loss), (expected, of) = run(quantized), run(reference)
        changed = ((run(dense)[0] - expected).norm() / expected.norm()).item()
    gap = ((y - expected).norm() / expected.norm()).item()
    share = inventory.line(quantized)[1]
    same = gap < 1e-4 and (loss is None or abs(loss - of) <= 1e-4 * abs(of))
    flags = next(module for _, module in modules.found(quantized))
    form = [name for name in ("is_transposed", "has_bias", "has_post_expert_norm") if getattr(flags, name, False)]
    form += [] if flags.has_gate else ["ungated"]
    text = f"{stacks} stacks, {share:.0%} of the elements; logits {gap:.0e}, without 4 bits {changed:.0e}"
    return ("equal" if same else "DIFFERS"), text + (f"; {', '.join(form)}" if form else "")


class Holder(torch.nn.Module):
    """An experts module by itself, which `experts.quantize` finds as in a model."""

    def __init__(self, own):
        super().__init__()
        self.experts = own


def tried_alone(classes, model):
    """One line about the experts module of a model."""
    name = f"{model.__module__}"
    config = shrink(model.config_class())
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    dense = Holder(getattr(sys.modules[name], classes[0])(config)).eval()
    for parameter in dense.parameters():
        parameter.data.normal_(0, 0.1)
    quantized = copy.deepcopy(dense)
    stacks = experts.quantize(quantized)
    reference = decoded(copy.deepcopy(dense), quantized)
    own = quantized.experts
    width = own.packed_stacks[modules.stack_names(own)[0]].shape[2]
    x, index = torch.randn(12, width), torch.arange(24).view(12, 2) % own.num_experts
    weights = torch.rand(12, 2)
    with torch.no_grad():
        y, expected = own(x, index, weights), reference.experts(x, index, weights)
    gap = ((y - expected).norm() / expected.norm()).item()
    form = [flag for flag in ("is_transposed", "has_bias", "has_post_expert_norm") if getattr(own, flag, False)]
    form += [] if own.has_gate else ["ungated"]
    text = f"the experts module alone, {stacks} stacks; results {gap:.0e}"
    return ("equal" if gap < 1e-4 else "DIFFERS"), text + (f"; {', '.join(form)}" if form else "")


def first_line(error):
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows, wrong = [], 0
    every = found()
    for index, (folder, (classes, models)) in enumerate(every.items()):
        if args.only not in folder:
            continue
        result, text = "left out", "no model with a head"
        for model in models:
            try:
                result, text = tried(model)
            except Exception as error:  # whatever its code says of this config
                result, text = "left out", first_line(error)
            if result != "left out":
                break
        if result == "left out" and models:
            try:
                result, alone = tried_alone(classes, models[0])
                text = f"{alone} (model: {text})"
            except Exception as error:
                text = f"{text}; alone: {first_line(error)}"
        wrong += result == "DIFFERS"
        name = model.__name__ if models else ", ".join(classes)
        rows.append((folder, name, result, text.replace("|", "/")))
        print(f"{index + 1:2d}/{len(every)} {folder:22s} {result:9s} {text}", flush=True)
    counts = {result: sum(row[2] == result for row in rows) for result in ("equal", "DIFFERS", "left out")}
    print(counts)
    if args.out:
        head = f"transformers {transformers.__version__}, torch {torch.__version__}: {counts}\n\n"
        table = "| folder | model | result | |\n|---|---|---|---|\n" + "".join(
            f"| {' | '.join(row)} |\n" for row in rows
        )
        Path(args.out).write_text(head + table, encoding="utf-8")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
