"""4-bit weights whose scales and codes are chosen for the inputs that they will meet; see docs/calibration.md.

ids = samples("text.txt", tokenizer, count=128, length=2048)
calibrate(model, ids, BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))   # a model in memory
calibrate_folder("Llama-3-8B", "Llama-3-8B-nf4", config, ids, device="cuda")              # a folder, layer by layer
"""

from bitshard.calibration.folder import Calibrated, calibrate_folder
from bitshard.calibration.layers import LayerReport
from bitshard.calibration.model import calibrate
from bitshard.calibration.samples import samples

__all__ = ["Calibrated", "LayerReport", "calibrate", "calibrate_folder", "samples"]
