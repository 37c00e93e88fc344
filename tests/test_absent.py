"""What bitshard does not have yet: it refuses with advice."""

import bitsandbytes as bnb
import pytest


@pytest.mark.parametrize("call", [lambda: bnb.nn.StableEmbedding(8, 8), lambda: bnb.nn.EmbeddingNF4(8, 8)])
def test_advice_fits(call):
    with pytest.raises(NotImplementedError, match="torch.nn.Embedding") as error:
        call()
    assert "bitsandbytes==0.50.2" in str(error.value), "the way back to the original"


def test_subclasses_of_others_name_the_absent_class():
    """The error of a class that derives from an absent one names the one that is absent."""
    own = type("OwnEmbedding", (bnb.nn.Embedding4bit,), {})
    with pytest.raises(NotImplementedError, match=r"bitsandbytes\.nn\.modules\.Embedding4bit is not"):
        own(8, 8)
