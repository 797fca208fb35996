"""What somebody has changed in a model since its engine was made: taken over where training can go on, or refused.

A parameter that was moved, or that another one of its shape and dtype has replaced, is trained on with the values that
it has now. What nobody would train, or would train wrongly, is refused by name.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from mizzen.ambient import AMBIENT
from mizzen.comm.fingerprint import compare
from mizzen.engine.prepare import sum_of_bits
from mizzen.errors import UsageError
from mizzen.model.tree import ModelTree, every_name, joined_module
from mizzen.optim.guard import Members, Sides
from mizzen.parallel.zero.full.sharded_parameter import is_sharded
from mizzen.plan.parts import Store


class ModelChanges:
    """Looks at a model before every forward that is differentiated, before every step, save and load."""

    def __init__(self, modules: Sequence[nn.Module], stores: Sequence[Store], optimizer: Optimizer | None) -> None:
        model = joined_module(modules)
        self.stores = tuple(stores)
        self.trees = [ModelTree(module) for module in modules]
        self.sides = Sides(model)
        self.members = Members(optimizer, model)
        self._values: list[dict[str, str]] = []
        """For each store a sum of each parameter, as they are before the step; empty if there are no new values."""

    @property
    def has_new_values(self) -> bool:
        """Whether parameters on this rank were given new values by a change, since the last step."""
        return any(store.status.has_new_values for store in self.stores)

    def check_step(self) -> None:
        """Refuse a step that would not be what it seems."""
        self.members.check()
        self.adopt()
        refuse_gathered(self.stores)
        self.sides.check(store.contents.trained for store in self.stores)
        self._values = [_sums(store) for store in self.stores] if self.has_new_values else []

    def compare(self, changed: float, ranks: int) -> None:
        """Once it is known how many ranks have new values: refuse a step unless all have the same. All call this."""
        if changed and changed < ranks:
            raise UsageError(
                f"parameters were moved or replaced on {int(changed)} of {ranks} ranks, and have other values there "
                "than before: make such a change on every rank"
            )
        for store, values in zip(self.stores, self._values, strict=False):
            if store.ranks.reduce_group is not None:
                compare(values, store.ranks.reduce_group)

    def adopt(self) -> None:
        """Train on with what stands in the model now, or say what of it cannot be."""
        stores = [store for store in self.stores if store.contents.trained]  # a released one has none
        if stores and not all(tree.is_unchanged() for tree in self.trees):
            for store in stores:
                store.restore_parameters({})
            self._exchange(stores)
            for tree in self.trees:
                tree.record()
        for store in stores:
            store.restore_parameters()

    def _exchange(self, stores: Sequence[Store]) -> None:
        now = {name: each for tree in self.trees for name, each in every_name(tree.model).items()}
        before = {name: each for tree in self.trees for name, each in tree.parameters.items()}
        known = {id(each) for each in before.values()}
        known |= {id(each) for store in stores for each in store.contents.held.values()}
        new = {name: parameter for name, parameter in now.items() if id(parameter) not in known}
        present = {id(parameter) for parameter in now.values()}
        for store in stores:
            for name, old in list(store.contents.trained.items()):
                if id(old) in present:
                    continue
                names = [place for place, each in before.items() if each is old]
                self._replace(store, name, {place: new.pop(place) for place in names if place in new})
        if added := [name for name, parameter in new.items() if parameter.requires_grad]:
            raise UsageError(
                f"{_some(added)} came to the model after initialize(), which decides what is trained, and nobody would "
                "train it: make a new engine of engine.module, or freeze it with requires_grad_(False)"
            )

    def _replace(self, store: Store, name: str, found: Mapping[str, Tensor]) -> None:
        """Let what stands in the places of a parameter be that parameter."""
        if not found:
            raise UsageError(
                f"'{name}' is no longer in the model, and its engine trains it: put it back, or make a new engine of "
                "engine.module"
            )
        first, *others = found.values()
        if any(each.data_ptr() != first.data_ptr() or each.shape != first.shape for each in others):
            raise UsageError(
                f"{', '.join(map(repr, found))} were one parameter, and were replaced by several: give them one again, "
                "or make a new engine of engine.module"
            )
        for each in others:  # a forward may have used both already
            if each is not first and each.grad is not None:
                first.grad = each.grad if first.grad is None else first.grad + each.grad
        old = store.contents.trained[name]
        owner = AMBIENT.owners.get(old)
        store.restore_parameters({name: first})
        AMBIENT.owners.remove(old)
        AMBIENT.owners.set(first, owner)
        for tree in self.trees:
            for place in found.keys() & every_name(tree.model).keys():
                path, _, leaf = place.rpartition(".")
                tree.model.get_submodule(path).register_parameter(leaf, store.contents.trained[name])


def refuse_gathered(stores: Iterable[Store]) -> None:
    """Refuse a step while somebody holds sharded parameters gathered."""
    if any(store.status.is_gathered for store in stores):
        raise UsageError("step() inside GatheredParameters, where parameters would keep their old values: leave it")


def _sums(store: Store) -> dict[str, str]:
    whole = {name: each for name, each in store.contents.trained.items() if not is_sharded(each)}
    return {f"the values of '{name}'": str(int(sum_of_bits(each))) for name, each in whole.items()}


def _some(names: Sequence[str]) -> str:
    return f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
