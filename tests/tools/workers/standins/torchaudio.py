"""Empty: LLaMA-Factory imports torchaudio for audio alone, and the build on PyPI does not load beside a CPU torch."""
