"""Who runs the parts of a model is said by the last change that has something to say."""

from types import SimpleNamespace

from mizzen.order import ORDER
from mizzen.plan.build import Plan
from mizzen.plan.transform import Transform


class Cuts(Transform):
    """A change whose choice is what makes a runner."""

    def runner(self, choice):
        return choice


def runner_of(*steps):
    named = [SimpleNamespace(transform=transform, choice=choice) for transform, choice in steps]
    return Plan.runner.fget(SimpleNamespace(steps=named))


def test_the_last_that_names_one():
    plain = ORDER[-1]  # it shards, and leaves the running to others
    assert runner_of() is runner_of((plain, None)) is None
    assert runner_of((Cuts(), "first"), (plain, None), (Cuts(), "last"), (plain, None)) == "last"
    assert runner_of((Cuts(), "first"), (Cuts(), None)) == "first"
