"""The command `bitshard`, and what other packages start by name: the plug-in of an upstream bitsandbytes.

Modules here import torch, transformers and the engine inside functions only, so that every command can say in one line
what is missing, and `use`, `unuse` and `run` need none of them.
"""
