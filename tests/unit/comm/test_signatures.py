"""Who can call torch.distributed can call `mizzen.comm`: the same arguments in the same order, the same defaults."""

import inspect

import pytest
import torch.distributed as torch_dist

import mizzen.comm as dist

SHARED = [name for name in dist.__all__ if inspect.isfunction(getattr(dist, name)) and hasattr(torch_dist, name)]


def test_the_collectives_are_among_them():
    assert {"all_gather_coalesced", "all_to_all_single", "barrier", "irecv", "new_group", "reduce_scatter_tensor"} <= {
        *SHARED
    }


@pytest.mark.parametrize("name", SHARED)
def test_the_arguments_are_those_of_torch(name):
    theirs = [
        (parameter.name, parameter.default)
        for parameter in inspect.signature(getattr(torch_dist, name)).parameters.values()
    ]
    own = [
        (parameter.name, parameter.default)
        for parameter in inspect.signature(getattr(dist, name)).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert own[: len(theirs)] == theirs
