"""What bitshard does not have: it refuses with its name and the way back."""

import bitsandbytes as bnb
import pytest


@pytest.mark.parametrize("name", ["XpuBNBNativeLibrary", "ErrorHandlerMockBNBNativeLibrary"])
def test_absent_classes_name_themselves(name):
    """Also where a class of others derives from them."""
    cls = getattr(bnb.cextension, name)
    for made in (cls, type("Own", (cls,), {})):
        with pytest.raises(NotImplementedError, match=rf"bitsandbytes\.cextension\.{name} is not in") as error:
            made(None)
        assert "bitsandbytes==0.50.2" in str(error.value), "the way back to the original"
