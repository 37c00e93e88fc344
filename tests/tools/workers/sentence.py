"""sentence-transformers over a tiny BERT in 4 bits: embeddings, the same after saving and loading."""

import bitsandbytes as bnb
import torch
from common import as_bytes, run

WORDS = [f"w{i}" for i in range(60)]
TEXTS = ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9 w10", "w2 w1 w3"]


def make(folder):
    """A BERT of two layers and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    BertModel(
        BertConfig(
            vocab_size=64,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=32,
        )
    ).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def load(folder, **options):
    from sentence_transformers import SentenceTransformer, models

    transformer = models.Transformer(str(folder), **options)
    return SentenceTransformer(modules=[transformer, models.Pooling(transformer.get_word_embedding_dimension())])


def packed(model):
    return {name: as_bytes(p).tolist() for name, p in model.named_parameters() if isinstance(p, bnb.nn.Params4bit)}


def main(options):
    args = options.parse_args()
    from sentence_transformers import SentenceTransformer
    from transformers import BitsAndBytesConfig

    make(args.out / "bert")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = load(args.out / "bert", model_args={"quantization_config": config, "device_map": {"": "cpu"}})
    bytes_of_model = packed(model)  # before any forward: the original repacks what it multiplies on CPUs
    first = model.encode(TEXTS, convert_to_tensor=True)
    model.save_pretrained(str(args.out / "saved"))
    again = SentenceTransformer(str(args.out / "saved"), device="cpu")
    result = {
        "packed": bytes_of_model,
        "kept": packed(again) == bytes_of_model,
        "embeddings": first.float().tolist(),
        "gap": float((again.encode(TEXTS, convert_to_tensor=True) - first).abs().max()),
        "dense": load(args.out / "bert").encode(TEXTS, convert_to_tensor=True).float().tolist(),
    }
    return args, result


run(main)
