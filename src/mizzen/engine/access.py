"""Whole parameters, gradients and optimizer states, read and written by the parameter alone, whoever holds them.

Everything is done over Pieces: no function here asks for a stage. Reading or writing a whole tensor is collective over
the ranks that share it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mizzen.ambient import AMBIENT
from mizzen.comm import collectives, groups
from mizzen.comm.fingerprint import compare, sum_of_bits
from mizzen.errors import CheckpointError, UsageError, expect
from mizzen.model.piece import Piece, copy_overlap, counted, piece_of_boxes, piece_of_whole
from mizzen.parallel.zero.full.init import held
from mizzen.parallel.zero.full.sharded_parameter import ShardedParameter
from mizzen.plan.parts import Store
from mizzen.precision.scaler import LossScaler
from mizzen.rewrite.forward import restore
from mizzen.wording import and_more


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Owner:
    """Who trains a parameter, and under which name. The engine keeps it; `AMBIENT.owners` only knows of it."""

    name: str
    store: Store
    optimizer: Optimizer | None
    scaler: LossScaler
    """By whose scale gradients are larger than they are read and written here."""
    checks: bool = False
    """Whether `gathered` looks for edits that were made on one rank only."""
    stage: int = 0
    """That of ZeRO in its engine, whether or not this parameter is sharded."""


def owner_of(parameter: nn.Parameter) -> Owner | None:
    """The engine state behind a parameter; None when no engine trains it."""
    expect(parameter, Tensor, "a parameter")
    found = AMBIENT.owners.get(parameter)
    if (
        isinstance(found, Owner) and found.name in found.store.contents.held
    ):  # one that has given it back may still live
        return found
    return None


def release_model(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Take a model away from the engine that has it, if one does: two engines cannot hold one parameter.

    Returns the parameter objects that are no longer the model's, each with the one in its place.
    """
    restore(model)
    before = dict(model.named_parameters())
    owners = [owner for parameter in before.values() if (owner := owner_of(parameter)) is not None]
    for store in {id(owner.store): owner.store for owner in owners}.values():
        store.release()
    after = dict(model.named_parameters())
    return [(old, after[name]) for name, old in before.items() if after[name] is not old]


def full_value(parameter: nn.Parameter) -> Tensor | None:
    """The master value of a parameter, whole, on every rank."""
    owner = owner_of(parameter)
    return None if owner is None else _gather(owner, _pieces(owner, "master"))


def full_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The reduced gradient of a parameter, whole, on every rank; between backward and step."""
    owner = _trainer_of(parameter)
    if owner is None:
        return None
    owner.store.reduce()
    return _gather(owner, _pieces(owner, "gradient")) * (owner.store.ranks.mean_factor / owner.scaler.scale)


def full_state(parameter: nn.Parameter, key: str) -> Tensor | None:
    """One optimizer state of a parameter, whole, on every rank; None before the first step, or if it has none."""
    owner = _trainer_of(parameter)
    if owner is None or owner.optimizer is None:
        return None
    known, pieces = _states(owner, key)
    held = sum(piece.numel for piece in pieces if piece.name == owner.name)
    if (sharers := owner.store.ranks.shard_group) is not None:
        # A rank that owns no whole parameter has not seen the states of those that others own.
        every: list[Any] = [None] * groups.get_world_size(sharers)
        collectives.all_gather_object(every, (known, held), group=sharers)
        known, held = set().union(*(names for names, _ in every)), sum(count for _, count in every)
    if not known:
        return None
    _check_key(known, key)
    return _gather(owner, pieces) if held == owner.store.contents.held[owner.name].numel() else None


def set_full_value(parameter: nn.Parameter, value: Tensor) -> None:
    """Write a parameter, the master weights and the working copy, from a whole tensor that every rank gives."""
    owner = _require(parameter)
    _scatter(owner, value, _pieces(owner, "master"))
    owner.store.update_copies("master", owner.name, lambda: value)


def set_full_gradient(parameter: nn.Parameter, value: Tensor) -> None:
    """Write the reduced gradient of a parameter from a whole tensor that every rank gives."""
    owner = _require(parameter)
    owner.store.reduce()
    factor = owner.scaler.scale / owner.store.ranks.mean_factor
    _scatter(owner, value, _pieces(owner, "gradient"), factor)
    owner.store.update_copies("gradient", owner.name, lambda: _part(owner, value) * factor)


def set_full_state(parameter: nn.Parameter, value: Tensor, key: str) -> None:
    """Write one optimizer state of a parameter from a whole tensor that every rank gives."""
    owner = _require(parameter)
    if full_state(parameter, key) is None or owner.optimizer is None:
        raise UsageError(
            f"the optimizer has no state '{key}' of the shape of '{owner.name}' to be set, or not before its first step"
        )
    _scatter(owner, value, owner.store.pieces(key, owner.optimizer.state, owner.name))


def local_value(parameter: nn.Parameter) -> Tensor | None:
    """This rank's own part of a master value, as it lies in memory; empty where it has none."""
    owner = owner_of(parameter)
    return None if owner is None else _local(owner, _pieces(owner, "master"))


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """This rank's own part of the reduced gradient; between backward and step.

    One rank may ask alone, unless gradients still wait to be summed: before the last backward of a step at stages 0 and
    1, after a bare `loss.backward()`, and between replicas of shards. Then every rank has to.
    """
    owner = _trainer_of(parameter)
    if owner is None:
        return None
    owner.store.reduce()
    return _local(owner, _pieces(owner, "gradient")) * (owner.store.ranks.mean_factor / owner.scaler.scale)


def local_state(parameter: nn.Parameter, key: str) -> Tensor | None:
    """This rank's own part of one optimizer state, empty where others have all of it; None before the first step."""
    owner = _trainer_of(parameter)
    if owner is None or owner.optimizer is None or _waits(owner):
        return None
    known, pieces = _states(owner, key)
    _check_key(known, key)
    return _local(owner, pieces)


def set_local_value(parameter: nn.Parameter, value: Tensor) -> None:
    """Write this rank's own part of a parameter. Every rank calls this, with its own part."""
    owner = _require(parameter)
    _write(owner, value, _pieces(owner, "master"))
    owner.store.update_copies("master", owner.name, lambda: _gather(owner, _pieces(owner, "master")))


def set_local_gradient(parameter: nn.Parameter, value: Tensor) -> None:
    """Write this rank's own part of the reduced gradient; alone where `local_gradient` is, but not at stage 1."""
    owner = _require(parameter)
    owner.store.reduce()
    _write(owner, value, _pieces(owner, "gradient"), owner.scaler.scale / owner.store.ranks.mean_factor)
    owner.store.update_copies("gradient", owner.name, lambda: _part(owner, _gather(owner, _pieces(owner, "gradient"))))


def set_local_state(parameter: nn.Parameter, value: Tensor, key: str) -> None:
    """Write this rank's own part of one optimizer state."""
    owner = _require(parameter)
    if owner.optimizer is None or _waits(owner):
        raise UsageError(f"the optimizer has no states before its first step: '{key}' cannot be set yet")
    known, pieces = _states(owner, key)
    _check_key(known, key)
    _write(owner, value, pieces)


def _pieces(owner: Owner, of: str) -> list[Piece]:
    """What this rank holds of a parameter."""
    return owner.store.pieces(of, only=owner.name)


def _states(owner: Owner, key: str) -> tuple[set[str], list[Piece]]:
    """The names of the states that this rank has, and the one that is asked for."""
    expect(key, str, "the name of an optimizer state, such as 'exp_avg',")
    states = owner.optimizer.state if owner.optimizer is not None else {}
    return {name for state in states.values() for name in state}, owner.store.pieces(key, states, owner.name)


def _waits(owner: Owner) -> bool:
    """Whether this rank steps something of a parameter, and has not yet."""
    stepped = {portion.name for portions in owner.store.contents.portions.values() for portion in portions}
    return owner.optimizer is not None and not owner.optimizer.state and owner.name in stepped


def _check_key(known: set[str], key: str) -> None:
    if known and key not in known:
        raise UsageError(f"the optimizer keeps no state '{key}'; it keeps {', '.join(sorted(known))}")


def _local(owner: Owner, pieces: list[Piece]) -> Tensor:
    parameter = owner.store.contents.held[owner.name]
    mine = [piece.data for piece in pieces if piece.name == owner.name]
    return mine[0].clone() if mine else torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def _write(owner: Owner, value: Tensor, pieces: list[Piece], factor: float = 1.0) -> None:
    _check_value(owner, value)
    mine = [piece for piece in pieces if piece.name == owner.name]
    count = sum(piece.numel for piece in mine)
    if count != value.numel():
        raise UsageError(f"this rank holds {count} elements of '{owner.name}'; the value given has {value.numel()}")
    for piece in mine:
        piece.check_writable()
        data = piece.data
        data.copy_((value * factor if factor != 1 else value).reshape(data.shape))
        piece.changed()


def _check_value(owner: Owner, value: Any) -> None:
    """What is written to a parameter, its gradient or a state is a plain tensor that has values of such a kind."""
    wanted = owner.store.contents.held[owner.name]
    if not isinstance(value, Tensor):
        given = f"a {type(value).__name__}"
    elif isinstance(value, DTensor | ShardedParameter):
        given = "a shard, of which full_tensor() is the whole"
    elif value.is_meta or (value.is_complex() and not wanted.is_complex()):
        given = f"one of {value.dtype} on {value.device}"
    else:
        return
    raise UsageError(f"'{owner.name}' takes a plain tensor with values of {wanted.dtype}; this is {given}")


def update_gradients(parameters: Iterable[nn.Parameter], change: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
    """Replace the reduced gradient of each parameter by what `change(gradient, parameter)` returns."""
    if not callable(change):
        raise UsageError(f"a function of (gradient, parameter) is wanted; this is a {type(change).__name__}")
    for parameter in _listed(parameters):
        gradient = full_gradient(parameter)
        if gradient is not None:
            set_full_gradient(parameter, change(gradient, parameter))


def refresh_masters(module: nn.Module, *_: object) -> None:
    """Take the values of a module's parameters over as masters. As a hook it holds no engine: modules are copied."""
    owners = [owner for parameter in module.parameters() if (owner := owner_of(parameter)) is not None]
    for store in {id(owner.store): owner.store for owner in owners}.values():
        store.restore_parameters({})


def load_state_dict(module: nn.Module, owners: Iterable[Owner], state: Any, *, strict: bool) -> None:
    """Load a state dict into a module, and then into the masters: it may hold more bits than the module."""
    if not isinstance(state, Mapping):
        raise UsageError(f"a state dict is wanted, names with tensors; this is a {type(state).__name__}")
    own = [name for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)]
    wrong = {str(name): type(name).__name__ for name in state if not isinstance(name, str)}
    wrong |= {name: type(state[name]).__name__ for name in own if name in state and not isinstance(state[name], Tensor)}
    if wrong:
        shown = and_more(f"{name!r} is a {kind}" for name, kind in wrong.items())
        raise UsageError(f"a state dict has names that are texts, and tensors under those of the model: {shown}")
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(f"the state dict does not fit the model: {error}") from error
    for owner in owners:
        value = state.get(owner.name)
        if not isinstance(value, Tensor) or isinstance(value, DTensor | ShardedParameter):  # shards are masters already
            continue
        if owner.name in owner.store.contents.trained:
            set_full_value(owner.store.contents.trained[owner.name], value)


def _trainer_of(parameter: nn.Parameter) -> Owner | None:
    owner = owner_of(parameter)
    return owner if owner is not None and owner.name in owner.store.contents.trained else None


def trained_name(parameter: nn.Parameter) -> str | None:
    """The name of a parameter that an engine trains."""
    owner = _trainer_of(parameter)
    return owner.name if owner is not None else None


def _compare(owned: Mapping[tuple[int, str], Owner], whole: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Find parameters that were edited on some ranks and not on others, where that was asked for."""
    checked = {
        place: owner for place, owner in owned.items() if owner.checks and owner.store.ranks.reduce_group is not None
    }
    if checked:
        sums = {name: str(int(sum_of_bits(whole[key][name]))) for key, name in checked}
        compare(sums, next(iter(checked.values())).store.ranks.reduce_group)


def _require(parameter: nn.Parameter) -> Owner:
    owner = _trainer_of(parameter)
    if owner is None:
        raise UsageError("no engine trains this parameter: it is frozen, or it does not belong to an initialized model")
    return owner


def _gather(owner: Owner, pieces: list[Piece]) -> Tensor:
    """Each element has one holder among the ranks that share it, so the sum of what they hold is the whole."""
    parameter, site = owner.store.contents.held[owner.name], owner.store.contents.sites.get(owner.name)
    mine = [part for piece in pieces if piece.name == owner.name for part, is_here in counted(piece, site) if is_here]
    dtype = torch.promote_types(parameter.dtype, torch.float32)  # the same on a rank that holds nothing of it
    whole = torch.zeros(_shape(owner), dtype=dtype, device=parameter.device)
    target = piece_of_whole(owner.name, whole)
    for piece in mine:
        copy_overlap(piece, target)
    if owner.store.ranks.shard_group is not None:
        collectives.all_reduce(whole, group=owner.store.ranks.shard_group)
    for axis in site.cut_axes if site is not None else ():
        collectives.all_reduce(whole, group=owner.store.ranks.cut_groups[axis])
    return whole


def _shape(owner: Owner) -> tuple[int, ...]:
    """Of the whole parameter, of which this rank may have a part."""
    site = owner.store.contents.sites.get(owner.name)
    return site.shape if site is not None else tuple(owner.store.contents.held[owner.name].shape)


def _part(owner: Owner, whole: Tensor) -> Tensor:
    """What the ranks that share this parameter have of a whole one."""
    site = owner.store.contents.sites.get(owner.name)
    return site.part_of(whole) if site is not None else whole


def _as_piece(owner: Owner, value: Tensor) -> Piece:
    """A value that is whole, or that is this rank's part already."""
    site = owner.store.contents.sites.get(owner.name)
    if site is None or tuple(value.shape) == site.shape:
        return piece_of_whole(owner.name, value)
    return piece_of_boxes(owner.name, site.shape, value, site.boxes_of_range(0, value.numel()))


def _scatter(owner: Owner, value: Tensor, pieces: list[Piece], factor: float = 1.0) -> None:
    _check_value(owner, value)
    expected = (_shape(owner), tuple(owner.store.contents.held[owner.name].shape))
    if tuple(value.shape) not in expected:
        raise UsageError(f"'{owner.name}' has shape {list(expected[0])}; the value given has {list(value.shape)}")
    source = _as_piece(owner, value * factor if factor != 1 else value)
    for piece in pieces:
        if piece.name == owner.name:
            copy_overlap(source, piece)


def _listed(parameters: Any) -> list[nn.Parameter]:
    if isinstance(parameters, nn.Parameter):
        return [parameters]
    if isinstance(parameters, Tensor | nn.Module) or not isinstance(parameters, Iterable):
        raise UsageError(f"parameters are wanted, one or several in a list; this is a {type(parameters).__name__}")
    return list(parameters)


@contextmanager
def gathered(parameters: nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
    """Whole parameters inside; at the end the values of `modifier_rank` are everyone's, and the masters follow.

    Of a parameter that is cut, as a matrix over tensor-parallel ranks, that is the part of this rank: its module
    computes with it. The modifier is counted among the ranks over which its gradient is averaged, and each part has
    its own; of what several parts have in common, the first one's is everyone's.

    Without a modifier rank what is written stays a local matter, as in a forward pass. Parameters that no engine trains
    and that were not sharded while they were built are left alone.
    """
    wanted = _listed(parameters)
    owned = {(id(owner.store), owner.name): owner for each in wanted if (owner := owner_of(each)) is not None}
    _check_modifier(modifier_rank, owned.values())
    stores = {id(owner.store): owner.store for owner in owned.values()}
    with ExitStack() as stack:
        stack.enter_context(held([each for each in wanted if owner_of(each) is None], modifier_rank))
        whole = {
            key: stack.enter_context(store.gather([name for place, name in owned if place == key]))
            for key, store in stores.items()
        }
        yield
        values = {}
        if modifier_rank is None:
            _compare(owned, whole)
        else:
            for (key, name), owner in owned.items():
                values[key, name] = _agreed(owner, whole[key][name].detach().clone(), modifier_rank)
    for place, value in values.items():
        owner = owned[place]
        with torch.no_grad():
            owner.store.update_copies("master", owner.name, value.detach)
        master = _part(owner, _gather(owner, _pieces(owner, "master")))
        if not torch.equal(master.to(value.dtype), value):  # an unchanged master keeps its low bits
            _scatter(owner, value, _pieces(owner, "master"))
            owner.store.update_copies("master", owner.name, value.detach)


def _check_modifier(rank: Any, owners: Iterable[Owner]) -> None:
    """Refuse a modifier that does not hold a parameter, or that is no rank at all."""
    if rank is None:
        return
    world = groups.get_world_size() if groups.is_initialized() else 1
    if type(rank) is not int or not 0 <= rank < world:
        raise UsageError(f"modifier_rank={rank!r} is no rank: there are {world}, counted from 0")
    for owner in owners:
        group = owner.store.ranks.reduce_group
        ranks = groups.get_world_size(group) if group is not None else 1
        if rank >= ranks:
            raise UsageError(
                f"modifier_rank={rank} of '{owner.name}': its gradient is averaged over {ranks} ranks, of which the "
                "modifier is one, counted from 0"
            )


def _agreed(owner: Owner, value: Tensor, modifier: int) -> Tensor:
    """What this rank is to have of a parameter, once all have what the modifier wrote."""
    ranks, site = owner.store.ranks, owner.store.contents.sites.get(owner.name)
    if ranks.reduce_group is not None:
        collectives.broadcast(value, group=ranks.reduce_group, group_src=modifier)
    for axis in site.copy_axes if site is not None else ():
        collectives.broadcast(value, group=ranks.cut_groups[axis], group_src=0)
    if site is None or not site.is_shared:
        return value
    whole = torch.zeros(site.shape, dtype=value.dtype, device=value.device)
    for part, is_here in counted(_as_piece(owner, value), site):
        if is_here:
            copy_overlap(part, piece_of_whole(owner.name, whole))
    for axis in site.cut_axes:
        collectives.all_reduce(whole, group=ranks.cut_groups[axis])
    return site.part_of(whole).contiguous()
