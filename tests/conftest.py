"""What every ring of tests has: ranks, as the fixture `world`."""

from collections.abc import Callable, Iterator

import pytest

from pool import Pool, World


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The process that ranks are forked from; it starts when the first rank is asked for."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def world(pool: Pool) -> Callable[..., World]:
    """`world(n).run(function, *args, **kwargs)` on n ranks, joined by gloo unless `init=False`."""

    def make(size: int, *, init: bool = True, backend: str = "gloo") -> World:
        return World(pool, size, backend if init else None)

    return make
