"""Small pictures that the examples of this folder make for themselves: coloured shapes on noise, ten kinds of them."""

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

KINDS = 10
SIDE = 16


def pictures(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(pictures of shape (count, 3, 16, 16) between -1 and 1, their kinds): five shapes in two colours."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, KINDS, (count,), generator=draw)
    middle = torch.randint(5, SIDE - 5, (count, 2, 1, 1), generator=draw)
    places = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij"))
    down, across = (places - middle).unbind(1)
    shapes = torch.stack(
        [
            down.square() + across.square() <= 12,  # disc
            (down.abs() <= 3) & (across.abs() <= 3),  # square
            (down.abs() <= 1) | (across.abs() <= 1),  # cross
            down.abs() == across.abs(),  # diagonals
            (down % 3 == 0) & (across.abs() <= 4),  # stripes
        ]
    )
    shape = shapes[kinds % 5, torch.arange(count)].unsqueeze(1)
    colour = torch.tensor([[1.0, 0.2, -0.6], [-0.6, 0.2, 1.0]])[kinds // 5].view(count, 3, 1, 1)
    noise = torch.randn(count, 3, SIDE, SIDE, generator=draw) * 0.3
    return torch.where(shape, colour, noise - 0.5).clamp(-1, 1), kinds


def shape_data(count: int, seed: int = 0) -> TensorDataset:
    """The shapes as a data set of (picture, kind)."""
    return TensorDataset(*pictures(count, seed))
