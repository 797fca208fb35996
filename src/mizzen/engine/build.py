"""From an applied plan to an engine: the only place where a run's variants are chosen."""

from typing import Any

from torch.optim import Optimizer

from mizzen.ambient import AMBIENT
from mizzen.engine.access import Owner
from mizzen.engine.engine import Driving, Engine
from mizzen.engine.face import Surroundings
from mizzen.engine.optimizer import EngineOptimizer, repoint
from mizzen.engine.runner import Accumulate
from mizzen.engine.update import Updater
from mizzen.monitor.report import Observer
from mizzen.plan.parts import Parts


def build_engine(
    parts: Parts,
    surroundings: Surroundings,
    *,
    optimizer: Optimizer | None,
    scheduler: Any,
    gain: float,
    observers: tuple[Observer, ...],
) -> Engine:
    """Put an engine together. `optimizer` was built on the model's own parameters; it is given the masters instead."""
    stores = [store for part in parts for store in part.stores]
    updater = None
    if optimizer is not None:
        names = {id(parameter): name for store in stores for name, parameter in store.parameters.items()}
        repoint(optimizer, [master for store in stores for master in store.masters()], names)
        limit = surroundings.resolved.config.gradient_clipping
        updater = Updater(stores, optimizer, surroundings.group, max_norm=limit, gain=gain)
    runner = Accumulate(parts[0].module, stores)
    engine = Engine(parts, Driving(runner, updater, None, scheduler, observers), surroundings)
    if optimizer is not None:
        engine.optimizer = EngineOptimizer(optimizer, step=engine.step, clear=engine.zero_grad)
    for store in stores:
        for name, parameter in store.parameters.items():
            AMBIENT.owners.set(parameter, Owner(name, store, optimizer))
    return engine

