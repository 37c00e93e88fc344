"""examples/grpo.py with a stand-in for the vLLM server, which generates with the weights that it is sent.

    accelerate launch --config_file fsdp2.yaml cpu_fsdp.py grpo_trainer.py OUT MODEL DATA    # in tests/fsdp

After each sending rank 0 compares what has come with peft's merging in one process: of an unsharded copy of the model
with the adapters of that moment. OUT.<rank> gets what was seen.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import bitshard.fsdp
import torch
import transformers
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from trl.generation import vllm_generation

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import grpo  # noqa: E402

OUT, MODEL, DATA = sys.argv[1:4]
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Server:
    """What TRL calls of its client, and a model in 16 bits behind it."""

    sent: list[dict] = []

    def __init__(self, base_url, group_port, connection_timeout):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()

    def init_communicator(self, device):
        assert RANK == 0

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def reset_prefix_cache(self):
        pass

    def update_named_params(self, metadata, named_params):
        """As vLLM: it knows names, dtypes and shapes, and gets the tensors in their order."""
        came, own = {}, dict(self.model.named_parameters())
        for (name, dtype, shape), (got, tensor) in zip(metadata, named_params, strict=True):
            assert got == name and tensor.dtype is getattr(torch, dtype) and list(tensor.shape) == list(shape), name
            came[name] = tensor.clone()
            own[name].data.copy_(tensor)
        assert came.keys() == own.keys(), came.keys() ^ own.keys()
        self.sent.append(came)

    def generate(self, prompts, features, n, max_tokens, **_):
        """Sampled token by token, each with its log-probability."""
        completions, logprobs = [], []
        generator = torch.Generator().manual_seed(len(self.sent))
        for prompt in prompts:
            for _ in range(n):
                ids, said = list(prompt), []
                for _ in range(max_tokens):
                    with torch.no_grad():
                        row = self.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(0)
                    token = int(torch.multinomial(row.exp(), 1, generator=generator))
                    ids.append(token)
                    said.append([float(row[token])])
                completions.append(ids[len(prompt) :])
                logprobs.append(said)
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


class Compared(transformers.TrainerCallback):
    """Keeps the adapters behind each step, whole; every rank gathers."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.adapters = [self.now()]

    def now(self):
        model, found = self.trainer.model_wrapped, {}
        fsdp1 = isinstance(model, FullyShardedDataParallel)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False) if fsdp1 else nullcontext():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                    found[name.replace("_fsdp_wrapped_module.", "")] = whole.detach().clone()
        return found

    def on_step_end(self, *_, **__):
        self.adapters.append(self.now())


def merged(trainer_model, adapters):
    """peft's merge_and_unload in one process, of dequantized weights: {name in the checkpoint: tensor}."""
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    quantized = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.bfloat16, device_map="cpu",
        quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
    )  # fmt: skip
    dense = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    for name, parameter in quantized.named_parameters():
        if isinstance(parameter, bnb.nn.Params4bit):
            parameter = bnb.functional.dequantize_4bit(parameter.data, parameter.quant_state)
        dense.get_parameter(name).data.copy_(parameter)
    own = trainer_model.peft_config["default"]
    lora = LoraConfig(r=own.r, lora_alpha=own.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    dense = get_peft_model(dense, lora, autocast_adapter_dtype=False)
    for name, parameter in dense.named_parameters():
        if "lora_" in name:
            parameter.data = adapters[name]
    return dense.merge_and_unload().state_dict()


def letters(completions, **_):
    """A reward that differs between completions of random weights."""
    return [sum(map(ord, completion)) % 7 / 7 for completion in completions]


def main():
    vllm_generation.is_vllm_available = lambda: True
    vllm_generation.VLLMClient = Server
    kept = []
    send = grpo.send_dense_weights

    def look(trainer):
        send(trainer)
        kept.append(Compared(trainer))
        trainer.add_callback(kept[0])

    grpo.send_dense_weights = look
    arguments = ["--model", MODEL, "--data", DATA, "--output", f"{OUT}-out", "--steps", "3", "--lr", "1e-2"]
    arguments += ["--batch", str(4 // WORLD), "--generations", "4", "--length", "6", "--rank", "4"]
    trainer = grpo.main(arguments, letters)
    report = {"sharded": bitshard.fsdp.describe(trainer.model_wrapped)}
    report["losses"] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if RANK == 0:
        sent = trainer.vllm_generation.vllm_client.sent
        report["sent"], report["wrong"] = len(sent), []
        for number, (came, adapters) in enumerate(zip(sent, kept[0].adapters, strict=False)):
            for name, value in merged(trainer.model, adapters).items():
                if name in came and not torch.equal(came[name], value.to(torch.bfloat16)):
                    report["wrong"].append(f"{number} {name} {(came[name].float() - value.float()).abs().max():.2e}")
        report["changed"] = sum(not torch.equal(sent[0][name], sent[-1][name]) for name in sent[0])
        rows = trainer.state.log_history
        report["ratios"] = [v for row in rows for k, v in row.items() if k.endswith("importance_sampling_ratio/mean")]
    Path(f"{OUT}.{RANK}").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
