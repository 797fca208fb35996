"""The arguments of `zero.Init` that are refused, told of, or taken without a word."""

import pytest

from mizzen import zero
from mizzen.ambient import AMBIENT
from mizzen.errors import UsageError


def test_a_word_that_it_does_not_have():
    with pytest.raises(UsageError, match="no argument zero_quantised_weights"):
        zero.Init(zero_quantised_weights=True)


def test_keys_of_the_configuration_are_told_of(caplog, monkeypatch):
    monkeypatch.setattr(AMBIENT, "warned", set())
    zero.Init(zero_quantized_weights=True, param_swapper=None, enabled=False)
    assert "zero_optimization.zero_quantized_weights of the configuration does" in caplog.text
    assert not zero.Init(zero_quantized_weights=False, enabled=False).is_wanted
