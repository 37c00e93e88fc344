"""Quantize, dequantize and multiply, with bitsandbytes' names and arguments; no gradients."""
