"""axolotl's own 4-bit experts on a tiny Qwen3-MoE: its parametrized stacks, its patch of peft, one step of training.

(A second forward fails with peft 0.21.2, whose `_remove_parametrizations` leaves its own proxy on a stack that has
another parametrization.)

    axolotl_experts.py --out FOLDER [--both]

On a CPU axolotl's patch of the loader leaves every stack as it is, for it asks for CUDA tensors; so the stacks are
replaced behind loading by the call that it makes. With --both bitshard's experts are on too, from the environment.
"""

import logging
import sys
import types

import bitsandbytes as bnb
import torch
from common import package_without_init, run
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TOKENS = torch.arange(48).view(2, 24) * 7 % 96


def make(folder):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2, initializer_range=0.1)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def main(options):
    options.add_argument("--both", action="store_true")
    args = options.parse_args()
    folder = args.out / "model"
    make(folder)
    for name in ("axolotl", "axolotl.monkeypatch", "axolotl.utils"):
        package_without_init(name)
    logs = types.ModuleType("axolotl.utils.logging")
    logs.get_logger = logging.getLogger
    sys.modules["axolotl.utils.logging"] = logs
    from axolotl.monkeypatch import moe_quant

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("bitshard").addHandler(handler)
    moe_quant.patch_moe_quantization_on_load(types.SimpleNamespace(load_in_4bit=True))
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **settings)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    stacks = [(layer.mlp.experts, name) for layer in model.model.layers for name in ("gate_up_proj", "down_proj")]
    quantized = sum(type(module._parameters[name]).__name__ == "Params4bit" for module, name in stacks)
    if not args.both:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        order = moe_quant._moe_load_state["expert_param_order"]
        for path, module in model.named_modules():
            if path.endswith("experts"):
                order[path] = list(module._parameters)
        for module, name in stacks:
            replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")
        quantized = sum("parametrizations" in module._modules for module, _ in stacks)
    moe_quant.patch_peft_target_parameters_matching()
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_parameters=TARGETS, init_lora_weights=False)
    model = get_peft_model(model, lora).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(2)
    for parameter in trained.values():
        parameter.data.normal_(0, 0.05, generator=generator)
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    losses = [loss.item(), *(float(parameter.grad.norm()) for parameter in trained.values())]
    result = {"losses": losses, "quantized": quantized, "count": moe_quant.get_moe_quantized_count()}
    result |= {"trained": sorted(trained), "said": [line for line in said if "axolotl" in line]}
    result["version"] = bnb.__version__
    return args, result


run(main)
