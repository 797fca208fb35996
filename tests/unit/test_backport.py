"""What differs between torch versions is behind one name, without warnings."""

import warnings

import pytest
import torch
import torch.distributed as dist

from mizzen import backport
from mizzen.errors import NotBuilt


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gather_and_scatter_of_one_tensor_do_not_warn(one_rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gathered, scattered = torch.zeros(2), torch.zeros(2)
        backport.all_gather_single()(gathered, torch.tensor([1.0, 2.0]))
        backport.reduce_scatter_single()(scattered, torch.tensor([3.0, 4.0]))
    assert gathered.tolist() == [1.0, 2.0]
    assert scattered.tolist() == [3.0, 4.0]


def test_an_argument_that_this_torch_has_not_is_named():
    backport.check_options(dist.new_group, {"group_desc": "even"})
    with pytest.raises(NotBuilt, match=f"torch {torch.__version__.split('+')[0]}.* has no colour= of new_group"):
        backport.check_options(dist.new_group, {"colour": "red"})


def test_gloo_exchanges_lists_exactly_where_it_says_so(one_rank):
    into = [torch.zeros(1)]
    if backport.gloo_exchanges_lists():
        dist.all_to_all(into, [torch.ones(1)])
        assert into[0].item() == 1.0
    else:
        with pytest.raises(RuntimeError, match="alltoall"):
            dist.all_to_all(into, [torch.ones(1)])
