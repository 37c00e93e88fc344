"""transformers, accelerate, peft and trl, unpatched, on the façade: one process, CPU, a tiny random Llama."""

import copy
import json

import bitsandbytes as bnb
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from helpers import tiny  # noqa: E402
from helpers.bytes import as_bytes, same_bytes, wrong_bytes  # noqa: E402
from peft.utils.integrations import dequantize_module_weight  # noqa: E402
from safetensors import safe_open  # noqa: E402
from transformers import AutoModelForCausalLM, BitsAndBytesConfig  # noqa: E402

VOCABULARY = 128
STORAGES = ["uint8", "int8", "bfloat16", "float16", "float32", "float64"]
FSDP_STORAGES = ["uint8", "bfloat16", "float16", "float32"]


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory):
    """Folder of a two-layer Llama with random bf16 weights; no size is a multiple of a power of two above 16."""
    path = tmp_path_factory.mktemp("dense")
    sizes = {"hidden_size": 80, "intermediate_size": 144, "num_attention_heads": 5, "num_key_value_heads": 1}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
    tiny.llama(path, torch.bfloat16, initializer_range=0.2, pad_token_id=0, **sizes)
    return path


@pytest.fixture(scope="module")
def dense(dense_path):
    return AutoModelForCausalLM.from_pretrained(dense_path, dtype=torch.bfloat16)


def config_4bit(storage="uint8", nested=True, quant_type="nf4", compute="bfloat16"):
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=storage,
    )


def load(path, *, dtype=torch.bfloat16, device="cpu", **options):
    """A quantized model. Without a device map transformers takes the GPU where there is one."""
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config_4bit(**options), dtype=dtype, device_map={"": device}
    )


def load_prequantized(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map={"": "cpu"})


def layers_4bit(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)}


def packed_bytes(model):
    """Packed bytes of every 4-bit layer, whatever container they are in."""
    return {name: as_bytes(module.weight) for name, module in layers_4bit(model).items()}


def without_peft_names(packed):
    """The names of the layers before peft wrapped the model."""
    return {name.removeprefix("base_model.model.").removesuffix(".base_layer"): data for name, data in packed.items()}


def assert_same_bytes(left, right):
    assert left.keys() == right.keys() and len(left) > 0
    for name in left:
        assert same_bytes(left[name], right[name]), name


def tokens(batch=2, length=12):
    torch.manual_seed(1)
    return torch.randint(1, VOCABULARY, (batch, length))


@torch.no_grad()
def logits(model):
    return model(tokens().to(model.device)).logits


def lora(model, **options):
    torch.manual_seed(0)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    )


def train(model, steps=8, lr=5e-3):
    """Losses of a few AdamW steps on one batch."""
    ids = tokens(4, 16).to(model.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def with_active_adapter(model):
    """LoRA's second matrix starts at zero; give it values so that the adapter changes the output."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
    return model


# ---- loading ----


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
def test_from_pretrained_bytes(dense_path, dense, storage, nested):
    """Each layer holds the codes of its own weight; the lm_head, norms and embeddings stay as they were."""
    model = load(dense_path, storage=storage, nested=nested)
    assert model.is_loaded_in_4bit and len(layers_4bit(model)) == 14
    weights = dict(dense.named_modules())
    for name, module in layers_4bit(model).items():
        packed, state = bnb.functional.quantize_4bit(
            weights[name].weight, blocksize=64, compress_statistics=nested, quant_type="nf4"
        )
        assert module.weight.dtype == getattr(torch, storage) and type(module.weight).__name__ == "Params4bit"
        assert module.weight.quant_state == state and module.quant_state is module.weight.quant_state
        stored = as_bytes(module.weight)
        assert torch.equal(stored[: packed.numel()], packed.flatten()) and not stored[packed.numel() :].any()
    assert torch.equal(model.lm_head.weight, dense.lm_head.weight)


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_forward_equals_dequantized_model(dense_path, quant_type, compute):
    """The 4-bit forward is that of a dense model that holds the dequantized weights, and independent of the storage."""
    dtype = getattr(torch, compute)
    outputs = [
        logits(load(dense_path, storage=storage, quant_type=quant_type, compute=compute, dtype=dtype))
        for storage in FSDP_STORAGES
    ]
    for other in outputs[1:]:
        assert torch.equal(outputs[0], other)
    model = load(dense_path, quant_type=quant_type, compute=compute, dtype=dtype)
    reference = logits(model.dequantize())
    assert not layers_4bit(model)
    error = (outputs[0].float() - reference.float()).norm() / reference.float().norm()
    assert error < {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[compute]


def test_dequantize_gives_the_decoded_weights(dense_path):
    model = load(dense_path)
    expected = {
        name: bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        for name, module in layers_4bit(model).items()
    }
    model = model.dequantize()
    modules = dict(model.named_modules())
    for name, weight in expected.items():
        assert type(modules[name]) is torch.nn.Linear and torch.equal(modules[name].weight, weight)


@pytest.mark.parametrize("storage", FSDP_STORAGES)
def test_num_parameters(dense_path, dense, storage):
    """144 x 80 and the other shapes fill whole storage elements, so the count by packed elements is exact."""
    assert load(dense_path, storage=storage).num_parameters() == dense.num_parameters()


def test_generate(dense_path):
    model = load(dense_path)
    prompt = tokens(1, 6)
    first = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert first.shape == (1, 14) and torch.equal(first[:, :6], prompt)
    with torch.no_grad():
        for position in range(6, 14):
            expected = model(first[:, :position]).logits[0, -1]
            assert expected[first[0, position]] >= expected.max() - 0.05  # cached and uncached keys round differently


def test_conv1d_models_are_transposed(tmp_path):
    """GPT-2 keeps weights as [in, out]; transformers hands over a transposed view."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=48, n_layer=1, n_head=3)
    source = transformers.GPT2LMHeadModel(config)
    source.save_pretrained(tmp_path)
    model = load(tmp_path, dtype=torch.float32, compute="float32")
    layer = model.transformer.h[0].attn.c_attn
    packed, _ = bnb.functional.quantize_4bit(
        source.transformer.h[0].attn.c_attn.weight.T.contiguous(), compress_statistics=True, quant_type="nf4"
    )
    assert wrong_bytes(layer.weight, packed) == 0
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


# ---- saving and loading again ----


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", FSDP_STORAGES)
def test_save_and_load_quantized(dense_path, tmp_path, storage, nested):
    """Quantized on the fly, saved, loaded, saved again from the pre-quantized model, loaded again."""
    model = load(dense_path, storage=storage, nested=nested)
    model.save_pretrained(tmp_path / "first")
    again = load_prequantized(tmp_path / "first")
    again.save_pretrained(tmp_path / "second", save_original_format=False)
    third = load_prequantized(tmp_path / "second")
    for other in (again, third):
        assert_same_bytes(packed_bytes(model), packed_bytes(other))
        assert torch.equal(logits(model), logits(other))
    name = "model.layers.0.mlp.up_proj.weight"
    expected = {"", ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4"}
    expected |= {".nested_absmax", ".nested_quant_map"} if nested else set()
    for folder in ("first", "second"):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            assert {key.removeprefix(name) for key in file.keys() if key.startswith(name)} == expected
            assert file.get_tensor(name).dtype == getattr(torch, storage)
        saved = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        assert saved["bnb_4bit_quant_storage"] == storage


def test_state_dict_round_trip(dense_path):
    model = load(dense_path)
    state = copy.deepcopy(model.state_dict())
    assert all(type(value) is torch.Tensor for value in state.values()), "torch.load(weights_only=True) wants plain"
    fresh = load(dense_path)
    with torch.no_grad():
        for module in layers_4bit(fresh).values():
            module.weight.data.view(torch.uint8).zero_()
    fresh.load_state_dict(state)
    assert_same_bytes(packed_bytes(model), packed_bytes(fresh))
    assert torch.equal(logits(model), logits(fresh))


# ---- PEFT ----


@pytest.mark.parametrize("storage", FSDP_STORAGES)
def test_lora_training_leaves_the_base_alone(dense_path, storage):
    model = lora(load(dense_path, storage=storage))
    before = packed_bytes(model)
    losses = train(model)
    assert losses[-1] < 0.9 * losses[0], losses
    assert_same_bytes(before, packed_bytes(model))
    for module in layers_4bit(model).values():
        assert not module.weight.requires_grad and module.weight.grad is None
    trainable, total = model.get_nb_trainable_parameters()
    assert trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert total - trainable == model.get_base_model().num_parameters() - trainable


def test_losses_are_the_same_for_every_storage(dense_path):
    runs = [train(lora(load(dense_path, storage=storage)), steps=4) for storage in FSDP_STORAGES]
    assert all(run == runs[0] for run in runs), runs


def test_lora_gradients_equal_those_of_the_dequantized_model(dense_path):
    def gradients(model):
        model = with_active_adapter(lora(model))
        model.train()
        ids = tokens()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    options = {"compute": "float32", "dtype": torch.float32}
    quantized = gradients(load(dense_path, **options))
    reference = gradients(load(dense_path, **options).dequantize())
    assert quantized.keys() == reference.keys() and len(quantized) > 20
    for name, gradient in quantized.items():
        torch.testing.assert_close(gradient, reference[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_losses(dense_path, use_reentrant):
    plain = train(lora(load(dense_path)), steps=3)
    model = load(dense_path)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert train(lora(model), steps=3) == plain


@pytest.mark.parametrize("storage", FSDP_STORAGES)
def test_prepare_model_for_kbit_training(dense_path, storage):
    """It casts 16-bit parameters to fp32 unless their class is named Params4bit."""
    model = load(dense_path, storage=storage)
    before, expected = packed_bytes(model), logits(model)
    model = peft.prepare_model_for_kbit_training(model)
    assert_same_bytes(before, packed_bytes(model))
    assert model.model.norm.weight.dtype == torch.float32
    for module in layers_4bit(model).values():
        assert module.weight.dtype == getattr(torch, storage)
    losses = train(lora(model))
    assert losses[-1] < 0.9 * losses[0], losses
    assert expected.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("storage", FSDP_STORAGES)
def test_moving_the_model_to_a_dtype_leaves_packed_weights(dense_path, storage, dtype):
    model = with_active_adapter(lora(load(dense_path, storage=storage)))
    before = packed_bytes(model)
    model.to(dtype)
    assert_same_bytes(before, packed_bytes(model))
    for module in layers_4bit(model).values():
        assert module.weight.dtype == getattr(torch, storage)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert parameter.dtype == dtype
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32"])
def test_casting_packed_weights_raises(dense_path, storage):
    """trl's experimental trainers cast every fp32 parameter; destroyed weights would still give a falling loss."""
    model = load(dense_path, storage=storage)
    other = torch.float32 if storage != "float32" else torch.bfloat16
    before = packed_bytes(model)
    for parameter in model.parameters():
        if isinstance(parameter, bnb.nn.Params4bit):
            with pytest.raises((TypeError, ValueError, RuntimeError), match="bnb_4bit_quant_storage|quant_storage"):
                parameter.data = parameter.data.to(other)
    assert_same_bytes(before, packed_bytes(model))


@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_merge(dense_path, storage, use_dora):
    """merge_and_unload quantizes (weight + adapter) again: exactly that, and close to the unmerged output."""
    model = with_active_adapter(lora(load(dense_path, storage=storage), use_dora=use_dora))
    unmerged = logits(model).float()
    expected = {}
    if not use_dora:
        for name, module in model.named_modules():
            if isinstance(module, peft.tuners.lora.bnb.Linear4bit):
                base = module.get_base_layer().weight
                delta = module.get_delta_weight("default")
                merged = bnb.functional.dequantize_4bit(base.data, base.quant_state).to(delta.dtype) + delta
                packed, _ = bnb.functional.quantize_4bit(
                    merged, compress_statistics=True, quant_type="nf4", quant_storage=base.quant_storage
                )
                expected[name.removeprefix("base_model.model.")] = as_bytes(packed)
    merged = model.merge_and_unload()
    if expected:
        assert_same_bytes(expected, packed_bytes(merged))
    assert len(layers_4bit(merged)) == 14
    error = (logits(merged).float() - unmerged).norm() / unmerged.norm()
    assert error < 0.4, error


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float32"])
def test_dora(dense_path, storage):
    model = lora(load(dense_path, storage=storage), use_dora=True)
    start = logits(model).float()
    plain = logits(load(dense_path, storage=storage)).float()
    assert (start - plain).norm() / plain.norm() < 2e-2, "an untrained DoRA adapter changes nothing"
    before = packed_bytes(model)
    losses = train(model)
    assert losses[-1] < 0.9 * losses[0], losses
    assert_same_bytes(before, packed_bytes(model))


def test_dequantize_module_weight(dense_path):
    layer = load(dense_path).model.layers[0].mlp.up_proj
    weight = dequantize_module_weight(layer)
    assert torch.equal(weight, bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state))
    assert type(weight) is not bnb.nn.Params4bit and weight.shape == (144, 80)


def test_adapter_save_and_load(dense_path, tmp_path):
    model = lora(load(dense_path))
    train(model, steps=2)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in key for key in file.keys())
    again = peft.PeftModel.from_pretrained(load(dense_path), tmp_path)
    assert torch.equal(logits(again), expected)


def test_deepcopy_of_a_model(dense_path):
    model = load(dense_path)
    other = copy.deepcopy(model)
    assert_same_bytes(packed_bytes(model), packed_bytes(other))
    for name, module in layers_4bit(other).items():
        original = layers_4bit(model)[name]
        assert module.weight.data_ptr() != original.weight.data_ptr()
        assert module.quant_state is not original.quant_state
        assert module.weight.quant_state is module.quant_state
        assert module.weight.module in (None, module)
    assert torch.equal(logits(model), logits(other))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("storage", FSDP_STORAGES)
def test_on_a_gpu(dense_path, storage):
    """Loaded where transformers puts it by itself: the bytes of the CPU, and a forward and training that agree."""
    reference = load(dense_path, storage=storage)
    model = AutoModelForCausalLM.from_pretrained(
        dense_path, quantization_config=config_4bit(storage), dtype=torch.bfloat16
    )
    assert model.device.type == "cuda"
    assert_same_bytes(packed_bytes(reference), packed_bytes(model))
    on_cpu, on_gpu = logits(reference).float(), logits(model).cpu().float()
    assert (on_cpu - on_gpu).norm() / on_cpu.norm() < 3e-2
    before = packed_bytes(model)
    losses = train(lora(model))
    assert losses[-1] < 0.9 * losses[0], losses
    assert_same_bytes(before, without_peft_names(packed_bytes(model)))


# ---- accelerate, Trainer ----


def test_accelerate_sets_tensors(dense):
    from accelerate.utils import set_module_tensor_to_device

    weight = dense.model.layers[0].mlp.up_proj.weight.detach()
    layer = bnb.nn.LinearNF4(80, 144, bias=False, compute_dtype=torch.bfloat16, device="meta")
    layer.requires_grad_(False)
    set_module_tensor_to_device(layer, "weight", "cpu", value=weight)
    # accelerate casts the value to the dtype that the layer has on the meta device
    packed, state = bnb.functional.quantize_4bit(weight.float(), compress_statistics=True, quant_type="nf4")
    assert wrong_bytes(layer.weight, packed) == 0 and layer.weight.quant_state == state
    set_module_tensor_to_device(layer, "weight", "meta")
    assert layer.weight.device.type == "meta"
    assert state == layer.quant_state, "the scales stay on the module and stay real"


def test_trainer(dense_path, tmp_path):
    model = lora(load(dense_path))
    ids = tokens(8, 16)
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path,
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=5e-3,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        bf16=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    before = packed_bytes(model)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert_same_bytes(before, packed_bytes(model))
    resumed = transformers.Trainer(model=lora(load(dense_path)), args=arguments, train_dataset=data)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    again = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert again == losses


def test_sft_trainer(dense_path, tmp_path):
    """trl makes the adapters itself and casts them to bf16; the base keeps its bytes."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "one": 3, "two": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    model = load(dense_path, storage="bfloat16")
    before = packed_bytes(model)
    arguments = trl.SFTConfig(
        output_dir=tmp_path,
        max_steps=5,
        per_device_train_batch_size=2,
        learning_rate=5e-3,
        max_length=16,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=True,
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"text": ["one two one two two one"] * 16}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 5 and losses[-1] < losses[0], losses
    assert_same_bytes(before, without_peft_names(packed_bytes(trainer.model)))


# ---- what is not trained ----


@pytest.mark.parametrize("launch", [{}, {"ACCELERATE_USE_FSDP": "true"}], ids=["one process", "FSDP"])
def test_modules_to_save_on_a_quantized_layer_raise(tmp_path, monkeypatch, launch):
    """peft adds the classifier to modules_to_save by itself: a quantized one would be called trainable and stay."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=3
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    for name, value in launch.items():
        monkeypatch.setenv(name, value)

    def adapted(skip):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path,
            device_map={"": "cpu"},
            quantization_config=BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skip),
        )
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], task_type="SEQ_CLS"))

    with pytest.raises(RuntimeError, match="llm_int8_skip_modules.*modules_to_save"):
        adapted(["pooler"])
    model = adapted(["classifier"])
    assert any(p.requires_grad for name, p in model.named_parameters() if "classifier.modules_to_save" in name)


def test_a_cast_of_fp32_parameters_in_a_launched_process(dense_path, monkeypatch):
    """As scripts write it. Under DDP and DeepSpeed packed bytes are uint8, and so nobody takes them for fp32."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = load(dense_path, dtype=torch.float32)
    before = packed_bytes(model)
    for parameter in model.parameters():
        if parameter.dtype is torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)
    assert_same_bytes(packed_bytes(model), before)
    assert {module.weight.dtype for module in layers_4bit(model).values()} == {torch.uint8}


# ---- models that tie a layer's weight, or read it themselves ----


def tied_llama():
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return tiny.llama(tie_word_embeddings=True, **sizes)


def longt5():
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
    sizes |= {"local_radius": 3, "decoder_start_token_id": 0}
    return transformers.LongT5ForConditionalGeneration(transformers.LongT5Config(**sizes))


def gemma3n():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCABULARY, "laurel_rank": 8}
    sizes |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0}
    sizes |= {"layer_types": ["full_attention"], "activation_sparsity_pattern": [0.0], "pad_token_id": 0}
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**sizes))


@pytest.mark.parametrize(
    "make, bits, skipped, words, advised",
    [
        (
            tied_llama,
            4,
            ["nothing"],
            r"lm_head is not quantized: its weight \[128, 64\] of float32 is tied to model.embed_tokens.weight.*"
            r"Name 'lm_head' in llm_int8_skip_modules",
            ["lm_head"],
        ),
        (
            longt5,
            4,
            None,
            r"x is uint8.*DenseReluDense\.wo\.weight.*in llm_int8_skip_modules.*Here: 'wo'",
            ["lm_head", "wo"],
        ),
        (
            gemma3n,
            4,
            None,
            r"clamp_: a 4-bit weight.*itself, name its layer in llm_int8_skip_modules",
            ["lm_head", "prediction_coefs", "correction_coefs"],
        ),
        (
            gemma3n,
            8,
            None,
            r"clamp_: an int8 weight.*itself, name its layer in llm_int8_skip_modules",
            ["lm_head", "prediction_coefs", "correction_coefs"],
        ),
    ],
    ids=["tied", "longt5", "gemma3n", "gemma3n int8"],
)
def test_the_advice_in_these_errors_helps(tmp_path, make, bits, skipped, words, advised):
    """The model raises, the error names a tie or a layer, and with what it says the model runs, in training too."""
    transformers.set_seed(0)
    make().save_pretrained(tmp_path)
    for skip in (skipped, advised):
        own = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32} if bits == 4 else {"load_in_8bit": True}
        config = BitsAndBytesConfig(llm_int8_skip_modules=skip, **own)
        model = getattr(transformers, make().__class__.__name__).from_pretrained(tmp_path, quantization_config=config)
        ids = torch.arange(4, 12).view(1, 8)
        inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if make is longt5 else {})}
        model.train()
        if skip is advised:
            assert model(**inputs).logits.isfinite().all()
            continue
        with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
            model(**inputs)
