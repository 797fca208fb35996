"""The modules and parameters of a model: whether one was exchanged since some time, parts as one model, stand-ins."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from mizzen.model.sketch import Sketch


class ModelTree:
    """Which module has which modules and parameters. Everything it knows it keeps alive, so no new object looks old.

    A sharded parameter is not looked at: it leaves its module and returns whenever its shards are gathered.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.record()

    def record(self) -> None:
        """Take the model as it stands now."""
        self.parameters: dict[str, Tensor] = every_name(self.model)
        """Every parameter by name, a tied one under each of its names."""
        modules = [module for module in self.model.modules() if type(module._parameters) is dict]
        places: list[tuple[dict[str, Any], str, Any]] = [
            (module._modules, name, inner) for module in modules for name, inner in module._modules.items()
        ]
        places += [
            (module._parameters, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
        ]
        self._tables: list[dict[str, Any]] = [table for table, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._objects = [there for _, _, there in places]
        parents = [module._modules for module in modules if module._modules]
        self._sized: list[dict[str, Any]] = [*parents, *(module._parameters for module in modules)]
        self._size = sum(map(len, self._sized))

    def is_unchanged(self) -> bool:
        """Whether every module and parameter still stands where it stood, and no other was added."""
        found = map(dict.get, self._tables, self._names)
        return sum(map(len, self._sized)) == self._size and all(map(is_, found, self._objects))


class Elsewhere(nn.Module):
    """Stands for a module that other ranks run: nothing of it is computed, cut or changed here."""


class InnerForward:
    """In the place of a module's `forward`: calls it with other arguments than the module itself is called with.

    Who wants to see the model's own arguments takes the place of `forward` here.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward


def modules_here(model: nn.Module, paths: Iterable[str]) -> Iterator[nn.Module]:
    """Those of a model's modules that this rank runs, by path."""
    modules = dict(model.named_modules())
    return (modules[path] for path in paths if path in modules and not isinstance(modules[path], Elsewhere))


def every_name(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model by name, a tied one under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def with_children(module: nn.Module, children: Mapping[str, nn.Module | None]) -> nn.Module:
    """A module like another, of whose tensors and settings it has the very ones, with children of its own."""
    found = copy.copy(module)
    vars(found)["_modules"] = dict(children)
    return found


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of a module by name, those that are None included."""
    return dict(module._modules)


def joined_module(modules: Sequence[nn.Module]) -> nn.Module:
    """Several parts of a model as one module, under the names of the whole model; one alone is itself.

    It has what they have, where they have it, and is there to be looked at: names, state dicts, `train()` and `to()`.
    Who runs the parts runs them one by one.
    """
    found = list({id(module): module for module in modules}.values())
    if len(found) == 1:
        return found[0]
    whole = nn.Module()
    whole.training = any(module.training for module in found)
    inside: dict[str, list[nn.Module]] = {}
    for module in found:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            whole.register_parameter(name, parameter)
        kept = {buffer.name for buffer in Sketch.of(module).buffers if buffer.persistent}
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            whole.register_buffer(name, buffer, persistent=name in kept)
        for name, child in module._modules.items():
            inside.setdefault(name, []).extend([child] if child is not None else [])
    for name, children in inside.items():
        whole.add_module(name, joined_module(children) if children else None)
    return whole
