"""What somebody has changed in a model since its engine was made: taken over where training can go on, or refused.

A parameter that was moved, or that another one of its shape and dtype has replaced, is trained on with the values that
it has now. What nobody would train, or would train wrongly, is refused by name.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from mizzen.ambient import AMBIENT
from mizzen.comm.fingerprint import compare, sum_of_bits
from mizzen.errors import CommError, UsageError
from mizzen.model.tree import ModelTree, every_name, joined_module
from mizzen.optim.guard import ParameterGuard, Sides
from mizzen.parallel.zero.full.sharded_parameter import is_sharded
from mizzen.plan.parts import Store
from mizzen.wording import and_more


class ModelChanges:
    """Looks at a model before every forward that is differentiated, before every step, save and load."""

    def __init__(self, modules: Sequence[nn.Module], stores: Sequence[Store], optimizer: Optimizer | None) -> None:
        model = joined_module(modules)
        self.stores = tuple(stores)
        self.trees = [ModelTree(module) for module in modules]
        self.sides = Sides(model)
        self.members = ParameterGuard(optimizer, model)

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

    def compare(self, changed: float) -> None:
        """Once it is known that ranks have new values: refuse a step unless all have the same of it. All call this.

        A change to what some ranks alone hold, such as a stage of a pipeline, is theirs to make.
        """
        if not changed:
            return
        for store in self.stores:
            sums, sites = _sums(store), store.contents.sites
            if store.ranks.reduce_group is not None:
                _compare(sums, store.ranks.reduce_group)
            for axis in dict.fromkeys(axis for site in sites.values() for axis in site.copy_axes):
                held = {name for name, site in sites.items() if axis in site.copy_axes}
                _compare({name: value for name, value in sums.items() if name in held}, store.ranks.cut_groups[axis])

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
    """A sum over the bits of each parameter that is not sharded."""
    whole = {name: each for name, each in store.contents.trained.items() if not is_sharded(each)}
    return {name: str(int(sum_of_bits(each))) for name, each in whole.items()}


def _compare(sums: Mapping[str, str], group: ProcessGroup) -> None:
    """Name a parameter of which some ranks have other values."""
    try:
        compare({f"the values of '{name}'": value for name, value in sums.items()}, group)
    except CommError as difference:
        raise UsageError(
            f"parameters were moved or replaced, and have other values on some ranks than on others: {difference}. "
            "Make such a change on every rank that holds them"
        ) from None


def _some(names: Sequence[str]) -> str:
    return and_more([f"'{name}'" for name in names], 1)
