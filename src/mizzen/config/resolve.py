"""From a configuration and a number of ranks to layout and batch, with what follows from them filled in. Pure.

HF Trainer and Accelerate put their own values in the place of "auto", before they call `initialize`. Until then such a
file is right, though not all of it is known: `with_batch` fills in what such a client would.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mizzen.config.batch import MICRO, TRAIN, TRIAD, Batch
from mizzen.config.dump import values
from mizzen.config.elasticity import compute_elastic
from mizzen.config.layout import Layout
from mizzen.config.schema import Config, Origin
from mizzen.errors import ConfigError, UsageError

DERIVED: Final = (*TRIAD, "data_parallel_size", "data_parallel_replicate_size")
"""Keys that are filled in when they are absent."""
TOTAL_STEPS: Final = "scheduler.params.total_num_steps"
OPEN_BATCH: Final = "filled in by the client; --batch N says how many samples a rank takes at once"
_LEFT_OPEN: Final = Origin("default", "until the client fills it in")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration that fits a number of ranks; its `config` holds the derived values too."""

    config: Config
    layout: Layout
    batch: Batch

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Where every value of the configuration comes from."""
        return {item.path: item.origin for item in values(self.config)}


def resolve(config: Config, world: int) -> Resolved:
    """Fit layout and batch to `world` ranks, or raise the error that says what does not fit."""
    config = _as_given(config)
    layout = _layout(config, world)
    batch, source = _batch(config, layout)
    facts = {key: (value, source) for key, value in batch.values().items()}
    facts["data_parallel_size"] = (layout.dp, f"{world} ranks")
    facts["data_parallel_replicate_size"] = (layout.dp_replicate, "zero_optimization.mics_shard_size")
    derived = {key: fact for key, fact in facts.items() if config.at(key) != fact[0]}
    filled = config.model_copy(update={key: value for key, (value, _) in derived.items()})
    origins = {key: Origin("derived", f"from {origin}") for key, (_, origin) in derived.items()}
    return Resolved(filled.with_origins(origins), layout, batch)


def _as_given(config: Config) -> Config:
    """What was derived for another world is derived again: a job whose world changes is resolved anew."""
    stale = [key for key in DERIVED if config.origin(key).kind == "derived"]
    fresh = config.model_copy(update={key: Config.model_fields[key].default for key in stale})
    return fresh.with_origins({key: Origin() for key in stale})


def _layout(config: Config, world: int) -> Layout:
    tensor, expert = config.tensor_parallel, config.expert_parallel
    degrees: dict[str, Any] = {
        "tp": max(tensor.autotp_size, tensor.tensor_parallel.tp_size, config.tensor_parallel_size),
        "pp": config.pipeline_parallel_size,
        "sp": config.sequence_parallel_size,
        "ep": expert.autoep_size if expert.enabled else 1,
        "data_before_expert": config.use_data_before_expert_parallelism,
    }
    dp = Layout.fit(world, **{**degrees, "ep": 1}).dp
    if config.data_parallel_size not in (None, dp):
        message = f"{config.data_parallel_size} is not what {world} ranks leave for it, {dp}: leave the key out"
        raise ConfigError("data_parallel_size", message)
    return Layout.fit(world, **degrees, dp_replicate=_replicas(config, dp))


def _replicas(config: Config, dp: int) -> int:
    """Copies of the sharded state, asked for by their number or, with MiCS, by the size of each."""
    replicas, shard = config.data_parallel_replicate_size, config.zero_optimization.mics_shard_size
    if shard < 1:
        return replicas
    if dp % shard:
        message = f"{shard} does not divide the {dp} data-parallel ranks"
        raise ConfigError("zero_optimization.mics_shard_size", message)
    if replicas not in (1, dp // shard):
        message = (
            f"{replicas} is not what zero_optimization.mics_shard_size = {shard} makes of {dp} data-parallel ranks, "
        )
        raise ConfigError("data_parallel_replicate_size", f"{message}{dp // shard}: leave one of the two out")
    return dp // shard


def _batch(config: Config, layout: Layout) -> tuple[Batch, str]:
    """The batch, and in words where it comes from."""
    if config.elasticity.enabled:
        return _elastic_batch(config, layout), "elasticity"
    given = [key for key in TRIAD if config.at(key) is not None]
    return Batch.solve(config, dp=layout.dp), f"{' and '.join(given)} with dp = {layout.dp}"


def _elastic_batch(config: Config, layout: Layout) -> Batch:
    parallel, asked = layout.world // layout.dp, config.elasticity.model_parallel_size
    if parallel != asked:
        version = " and elasticity.version to 0.2" if config.elasticity.version == 0.1 else ""
        message = f"{asked} is not the number of ranks that share one copy of the model, {parallel}"
        raise ConfigError("elasticity.model_parallel_size", f"{message}: set it to {parallel}{version}")
    found = compute_elastic(config.elasticity, layout.world)
    if found.micro is None:
        raise AssertionError(f"no micro-batch for {layout.world} ranks in {found}")
    return Batch(found.batch, found.micro, found.batch // (found.micro * layout.dp), layout.dp)


def check_filled_in(config: Config) -> None:
    """Refuse to make a schedule whose length is still "auto"."""
    if config.is_auto(TOTAL_STEPS):
        raise ConfigError(TOTAL_STEPS, '"auto", and no client has filled it in: give a value')


def with_batch(config: Config, micro: int | None) -> Config:
    """The configuration with the batch that a client would fill in: `micro` samples per forward pass of a rank.

    Without `micro`, a batch that the file leaves to the client is one sample, and `is_batch_open` says so.
    """
    if micro is not None:
        _check_open(config, micro)
        return _with_micro(config, micro, Origin("given", "as --batch"))
    is_left = config.is_auto(TRAIN) or config.is_auto(MICRO)
    is_known = config.elasticity.enabled or config.at(TRAIN) is not None or config.at(MICRO) is not None
    return config if is_known or not is_left else _with_micro(config, 1, _LEFT_OPEN)


def is_batch_open(config: Config) -> bool:
    """Whether only a client knows the batch."""
    return config.origin(MICRO) == _LEFT_OPEN


def _check_open(config: Config, micro: int) -> None:
    if config.elasticity.enabled:
        raise UsageError(f"--batch {micro}: the batch of this file is that of its section elasticity")
    if (given := config.at(MICRO)) is not None:
        raise UsageError(f"--batch {micro}: the file itself has {MICRO} = {given}")


def _with_micro(config: Config, micro: int, origin: Origin) -> Config:
    return config.model_copy(update={MICRO: micro}).with_origins({MICRO: origin})
