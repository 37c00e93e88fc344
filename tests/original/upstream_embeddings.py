"""Run by test_embeddings.py with the original bitsandbytes: values of its embeddings, and the modules pickled.

python tests/original/upstream_embeddings.py FOLDER
"""

import json
import sys
from pathlib import Path

import bitsandbytes as bnb
import torch

CASES = {
    f"{cls}-{n}-{k}": (cls, n, k)
    for cls in ("EmbeddingNF4", "EmbeddingFP4", "Embedding8bit", "StableEmbedding")
    for n, k in ((50, 64), (33, 128))
}


def main(folder: Path) -> None:
    """Save (rows, weight, what the embedding gives) and the module of each case."""
    for name, (cls, n, k) in CASES.items():
        generator = torch.Generator().manual_seed(n)
        weight, rows = torch.randn(n, k, generator=generator), torch.randint(0, n, (3, 4), generator=generator)
        module = getattr(bnb.nn, cls)(n, k)
        module.load_state_dict({"weight": weight}, strict=False)
        module.to("cpu")
        y = module(rows).detach()
        torch.save((rows, weight, y), folder / f"{name}.pt")
        torch.save(module, folder / f"{name}.module.pt")
    (folder / "cases.json").write_text(json.dumps(CASES))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
