"""The tiny model of `common.make_model`, and rows of text for it, the same four again and again: model, rows.json."""

import json
import sys
from pathlib import Path

import torch
from common import make_model, texts

folder = Path(sys.argv[1])
make_model(folder / "model", torch.float32)
(folder / "rows.json").write_text(json.dumps([{"text": text} for text in texts(4) * 8]))
