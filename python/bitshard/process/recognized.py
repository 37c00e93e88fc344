"""By what other libraries know a module of bitsandbytes that is not in its class's name; docs/tools.md has every way.

Some look for a class in `type(module).__mro__` whose `__module__` begins with "bitsandbytes", and take 4-bit weights of
other modules for a mistake of the checkpoint: they dequantize them. So each module that bitsandbytes has, and each that
holds packed weights, has the class below among its bases.

The modules themselves keep the `__module__` of the file that they are in. Pickles name a class by it, and have to load
where bitsandbytes is not installed or is another one; `inspect` looks for the source there, `typing` for the names in
annotations, and `bitshard.lora` for the file of a forward. Of the class below nothing is asked: it is empty, is no
instance's own class, and so stands in no pickle.
"""


class OfBitsandbytes:
    """A base, the last one, of modules that are to be taken for bitsandbytes' own."""

    __slots__ = ()
    __module__ = "bitsandbytes.nn.modules"
