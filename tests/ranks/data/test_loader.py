"""Real ranks, each with its own loader: the global batches are those of one rank, also after the number changes."""

import pytest
import torch.distributed as dist
from torch.utils.data import Dataset

from mizzen.data.loader import LoaderFactory

TRAIN, SIZE = 12, 40


class Squares(Dataset):
    """A data set whose samples say which they are."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return {"index": index, "square": index * index}


def some_steps(state, steps, workers):
    """(samples of each step in global order, position), as all ranks together see them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    micro = 2 if ranks < 4 else 1
    accumulation = TRAIN // micro // ranks
    factory = LoaderFactory(seed=11 if state is None else 99, rank=rank, ranks=ranks, accumulation=accumulation)
    loader = factory(Squares(), batch_size=micro, workers=workers)
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    while len(seen) < steps:
        step = []
        for number, batch in enumerate(loader, 1):
            assert (batch["index"] ** 2 == batch["square"]).all()
            parts = [None] * ranks
            dist.all_gather_object(parts, batch["index"].tolist())
            step += sum(parts, [])
            if number % accumulation == 0:
                seen.append(step)
                step = []
                if len(seen) == steps:
                    break
    return seen, loader.state_dict()


def agreed(results):
    """What all ranks found, if they found the same."""
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.fixture(scope="module")
def alone(world):
    """Ten steps of one rank: two and a half epochs."""
    steps, _ = agreed(world(1).run(some_steps, None, 10, 0))
    assert len({tuple(step) for step in steps}) == 10
    return steps


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (2, 1), (3, 0), (4, 0)])
def test_steps_do_not_depend_on_the_number_of_ranks(world, alone, ranks, workers):
    steps, _ = agreed(world(ranks).run(some_steps, None, 10, workers))
    assert steps == alone


def test_steps_go_on_when_the_number_of_ranks_changes(world, alone):
    state, steps = None, []
    for ranks, count in [(2, 1), (1, 2), (4, 2), (3, 2), (2, 3)]:
        found, state = agreed(world(ranks).run(some_steps, state, count, 0))
        steps += found
        assert state["samples"] % TRAIN == 0 and state["seed"] == 11
    assert steps == alone
