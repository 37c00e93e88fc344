"""Every writer of checkpoints on one model of each kind that a writer has lost or misnamed tensors of.

What is loaded again by the model's own class gives what the model gave that was written, or the writer has raised
before the first byte: `helpers.writers`. `benchmarks/writers.py` does the same for all architectures.
"""

import pytest

pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from helpers import writers  # noqa: E402
from helpers.wrappers import CHANGES_BASE, DENSE_ONLY, TUNERS, WRAPPERS  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def one_layer_twice(model):
    """The same layer at two places."""
    model.model.layers[1] = model.model.layers[0]


def one_weight_twice(model):
    """Two layers, one weight."""
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight


def published_names(folder):
    """As BERT's published files have them."""
    file = folder / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(file)
    for new, name in old.items():
        tensors = {key.replace(new, name): tensor for key, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})


SUBJECTS = {
    "llama": ("LlamaForCausalLM", {}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "layer twice": ("LlamaForCausalLM", {"change": one_layer_twice}),
    "weight twice": ("LlamaForCausalLM", {"change": one_weight_twice}),
    "gpt2": ("GPT2LMHeadModel", {}),  # Conv1D
    "bert": ("BertForMaskedLM", {}),  # renamed, and a bias that is tied
    "bert, old names": ("BertForMaskedLM", {"files": published_names}),
    "albert": ("AlbertForMaskedLM", {}),  # one layer for all
    "bart": ("BartForConditionalGeneration", {}),  # a tensor of the model itself; three tied places
    "llava": ("LlavaForConditionalGeneration", {}),  # a model inside of another
}
STREAMS, FOLDERS = ("dense_weights", "dense_weights (dense)"), ("merge (dense)", "merge", "merge 4bit")
SAVES = ("save", "save dtype", "save merge", "save merge dtype", "save merge (dense)")
# (model, wrapper): ways that must give the model again
WORKS = {
    ("tied", None): ("save", "dense_weights", "quantize"),
    ("tied", "lora embedding"): ("save merge", "save merge dtype", "dense_weights", "merge (dense)", "merge 4bit"),
    ("tied", "lora head"): ("save", "save merge", "save merge dtype", "dense_weights", "merge"),
    ("tied", "modules_to_save embedding"): ("save", "save merge", "dense_weights", *FOLDERS),
    ("tied", "modules_to_save head"): ("save merge dtype", "merge (dense)"),
    ("tied", "modules_to_save ties"): ("save merge dtype", "merge (dense)"),
    ("tied", "trainable_token_indices"): ("save", "save merge", "dense_weights", "merge (dense)", "merge 4bit"),
    ("llama", "trainable_token_indices"): ("save dtype", "save merge (dense)", "merge"),
    ("llama", "layer_replication"): ("save", "save merge", "save merge dtype", "dense_weights"),
    ("layer twice", None): ("save", "save dtype", "dense_weights"),
    ("layer twice", "lora"): ("save merge", "dense_weights"),
    ("weight twice", None): ("save", "save (dense)"),
    ("weight twice", "lora second"): ("save merge", "save merge dtype", "dense_weights"),
    ("gpt2", None): ("save", "save dtype", "dense_weights", "quantize"),
    ("gpt2", "lora"): ("save merge", "save merge dtype", "dense_weights", *FOLDERS),
    ("bert", None): ("save", "dense_weights", "quantize"),
    ("bert", "modules_to_save embedding"): ("save merge dtype", "dense_weights"),
    ("bert", "lora"): ("merge (dense)",),
    ("bert, old names", None): ("save", "dense_weights", "quantize"),
    ("albert", None): ("save", "quantize"),
    ("albert", "lora"): ("save merge", "merge (dense)"),
    ("bart", None): ("save", "dense_weights", "quantize"),
    ("bart", "lora"): ("save merge", "merge (dense)", "merge 4bit"),
    ("bart", "modules_to_save embedding"): ("save merge dtype", "dense_weights"),
    ("bart", "modules_to_save head"): ("save merge (dense)",),
    ("bart", "lora head"): ("save merge dtype",),
    ("llava", None): ("save", "dense_weights", "quantize"),
    ("llava", "lora"): ("save merge", "merge (dense)"),
    **{
        ("llama", name): ("save", "save merge", "save merge dtype")
        for name in ("lora", "dora", "rslora", "lora twice", "add_adapter", "target_parameters", "lora bias=all")
    },
}
# what cannot be written exactly, or is no part of a weight, may be refused
MAY_RAISE = {
    ("gpt2", "lora_bias"): ("save merge", "save merge dtype"),
    ("llama", "lora_bias"): ("save", "save merge", "save merge dtype", "save merge (dense)", "dense_weights", "merge"),
    ("llama", "layer_replication"): ("merge (dense)",),
    **{("llama", name): ("save", "save merge", "dense_weights") for name in sorted(TUNERS) if name not in DENSE_ONLY},
    **{("llama", name): ("save (dense)", "save merge (dense)", "dense_weights (dense)") for name in sorted(DENSE_ONLY)},
}
CASES = [
    pytest.param(subject, wrapper, way, raises, id=f"{subject}-{wrapper}-{way}")
    for table, raises in ((WORKS, False), (MAY_RAISE, True))
    for (subject, wrapper), ways in table.items()
    for way in ways
]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            cls, options = SUBJECTS[name]
            made[name] = writers.Subject(getattr(transformers, cls), tmp_path_factory.mktemp("model"), **options)
            made[name].prepare()
        return made[name]

    return get


@pytest.mark.parametrize(("subject", "wrapper", "way", "may_raise"), CASES)
def test_what_is_written_is_the_model(subjects, tmp_path, subject, wrapper, way, may_raise):
    """Or, where that may be, an error that says why, before the first byte."""
    wrap = None if wrapper is None else WRAPPERS[wrapper]
    result = writers.tried(subjects(subject), way, wrap, tmp_path, wrapper in CHANGES_BASE)
    if result.kind == "left out":
        pytest.skip(result.words)  # this version of peft makes no such adapters
    assert result.kind in (("ok", "raises") if may_raise else ("ok",)), result.words
