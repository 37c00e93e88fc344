"""A language model of two small layers with random weights, its tokenizer (a token for each byte) and a text.

    python examples/tiny.py FOLDER

For machines without a model hub: the other examples take it with --tiny. It learns, and says nothing of interest.
"""

import os
import shutil
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def make(folder: Path) -> tuple[Path, Path]:
    """Folder of the model and file of the text below `folder`, made on the first call.

    Every process of a launch may call it, before it joins a process group, in which transformers saves on rank 0 only.
    """
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        write(part)
        try:
            part.rename(folder)  # fails where another one was faster
        except OSError:
            shutil.rmtree(part)
    return folder / "model", folder / "text.txt"


def write(folder: Path) -> None:
    """Write model, tokenizer and text."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        pad_token_id=fast.pad_token_id,
        eos_token_id=fast.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "text.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)[:20]), encoding="utf-8")


if __name__ == "__main__":
    print(*make(Path(sys.argv[1])))
