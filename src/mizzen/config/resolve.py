"""From a configuration and a number of ranks to layout and batch, with what follows from them filled in. Pure.

The batch is a triad, train = micro * accumulation * dp, in whole numbers; `elasticity.py` computes elastic batches.
HF Trainer and Accelerate put their own values in the place of "auto", before they call `initialize`. Until then such a
file is right, though not all of it is known: `with_batch` fills in what such a client would.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mizzen.config.elasticity import ElasticLayoutConfig, compute_elastic
from mizzen.config.layout import Layout
from mizzen.config.schema import Config, Origin, values
from mizzen.errors import ConfigError, LayoutError, UsageError

TRAIN: Final = "train_batch_size"
MICRO: Final = "train_micro_batch_size_per_gpu"
ACCUMULATION: Final = "gradient_accumulation_steps"
TRIAD: Final = (TRAIN, MICRO, ACCUMULATION)


@dataclass(frozen=True, slots=True)
class Batch:
    """How many samples one optimizer step sees, and how they are split over micro-steps and data-parallel ranks."""

    train: int
    micro: int
    accumulation: int
    dp: int

    def __post_init__(self) -> None:
        if self.train != self.micro * self.accumulation * self.dp:
            raise ConfigError(
                TRAIN,
                f"{self.train} is not {MICRO} * {ACCUMULATION} * dp = {self.micro} * {self.accumulation} * {self.dp} "
                f"= {self.micro * self.accumulation * self.dp}: leave one of the three out and it is derived",
            )

    @classmethod
    def solve(cls, given: Config | Mapping[str, Any], *, dp: int) -> "Batch":
        """Fill in what is absent: two of the triad give the third; train or micro alone mean no accumulation."""
        if not _is_count(dp):
            raise LayoutError(f"the number of data-parallel ranks is {dp!r}; it is a whole number of at least 1")
        train, micro, accumulation = (_read(given, key) for key in TRIAD)
        if train is None:
            if micro is None:
                raise _nothing_to_derive_from(accumulation)
            steps = accumulation or 1
            return cls(micro * steps * dp, micro, steps, dp)
        if micro is not None:
            steps = accumulation or _quotient(train, {MICRO: micro, "dp": dp})
            return cls(train, micro, steps, dp)
        if accumulation is not None:
            return cls(train, _quotient(train, {ACCUMULATION: accumulation, "dp": dp}), accumulation, dp)
        return cls(train, _quotient(train, {"dp": dp}), 1, dp)

    def values(self) -> dict[str, int]:
        """The triad under the names it has in the JSON."""
        return {TRAIN: self.train, MICRO: self.micro, ACCUMULATION: self.accumulation}

    def __str__(self) -> str:
        return f"{self.train} = micro {self.micro} * accumulation {self.accumulation} * dp {self.dp}"


def check_batch(config: Config) -> None:
    """Refuse a triad that no number of data-parallel ranks can share, or not the number that the file itself names."""
    if config.elasticity.enabled:
        _check_elastic(config)
        return
    factors = {key: config.at(key) for key in (MICRO, ACCUMULATION, "data_parallel_size")}
    given = {key: value for key, value in factors.items() if value is not None}
    if config.train_batch_size is not None and given:
        _quotient(config.train_batch_size, given)
    if config.train_batch_size is not None and len(given) == len(factors):
        Batch(config.train_batch_size, *given.values())


def _check_elastic(config: Config) -> None:
    elastic, given = config.elasticity, [key for key in TRIAD if config.at(key) is not None]
    if given and not elastic.ignore_non_elastic_batch_info:
        raise ConfigError(
            given[0],
            "given although elasticity.enabled derives the batch: leave it out, "
            "or set elasticity.ignore_non_elastic_batch_info to true",
        )
    largest = max(elastic.micro_batch_sizes, default=0)
    if elastic.max_train_batch_size and largest > elastic.max_train_batch_size:
        message = f"{largest} is above elasticity.max_train_batch_size, {elastic.max_train_batch_size}"
        raise ConfigError("elasticity.micro_batch_sizes", message)


def _read(given: Config | Mapping[str, Any], key: str) -> int | None:
    value = given.at(key) if isinstance(given, Config) else given.get(key)
    if value is None:
        return None
    if not _is_count(value):
        raise ConfigError(key, f"{value!r} is not a whole number of at least 1")
    return int(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _quotient(train: int, divisors: Mapping[str, int]) -> int:
    """`train` over the product of `divisors`, or an error with the nearest batch sizes that would divide."""
    product = math.prod(divisors.values())
    if train % product == 0:
        return train // product
    below = train - train % product
    fitting = f"nearest that fit are {below} and {below + product}" if below else f"least that fits is {product}"
    names = " * ".join(divisors)
    numbers = " * ".join(str(value) for value in divisors.values())
    anywhere = ", on any number of ranks" if divisors.keys() <= {MICRO, ACCUMULATION} else ""
    shown = (f"{names} = {numbers} = {product}" if len(divisors) > 1 else f"{names} = {product}") + anywhere
    raise ConfigError(TRAIN, f"{train} is not a multiple of {shown}: the {fitting}")


def _nothing_to_derive_from(accumulation: int | None) -> ConfigError:
    if accumulation is None:
        return ConfigError(TRAIN, f'no batch size is given ("auto" gives none): give {TRAIN} or {MICRO}')
    return ConfigError(
        TRAIN, f"{ACCUMULATION} = {accumulation} alone gives no batch size: give also {TRAIN} or {MICRO}"
    )


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
    config = at_world(_as_given(config), world)
    layout = _layout(config, world)
    batch, source = _batch(config, layout)
    facts = {key: (value, source) for key, value in batch.values().items()}
    facts["data_parallel_size"] = (layout.dp, f"{world} ranks")
    facts["data_parallel_replicate_size"] = (layout.dp_replicate, "zero_optimization.mics_shard_size")
    derived = {key: fact for key, fact in facts.items() if config.at(key) != fact[0]}
    filled = config.model_copy(update={key: value for key, (value, _) in derived.items()})
    origins = {key: Origin("derived", f"from {origin}") for key, (_, origin) in derived.items()}
    return Resolved(filled.with_origins(origins), layout, batch)


def at_world(config: Config, world: int) -> Config:
    """The configuration with the degrees that `elasticity.layouts` lists for so many ranks, if it does."""
    found: list[ElasticLayoutConfig] = [each for each in config.elasticity.layouts if each.ranks == world]
    if not found:
        return config
    if len(found) > 1:
        raise ConfigError("elasticity.layouts", f"there are {len(found)} for {world} ranks: leave one of them")
    tensor = config.tensor_parallel.model_copy(update={"autotp_size": found[0].autotp_size})
    return config.model_copy(
        update={"tensor_parallel": tensor, "pipeline_parallel_size": found[0].pipeline_parallel_size}
    )


def _as_given(config: Config) -> Config:
    """What was derived for another world is derived again: a job whose world changes is resolved anew."""
    stale = [key for key in DERIVED if config.origin(key).kind == "derived"]
    fresh = config.model_copy(update={key: Config.model_fields[key].default for key in stale})
    return fresh.with_origins({key: Origin() for key in stale})


def split_degree(config: Config) -> int:
    """The ranks that are to share each layer of a model that is split by the configuration, under whichever key."""
    tensor = config.tensor_parallel
    return max(1, tensor.autotp_size, tensor.tensor_parallel.tp_size)


def _layout(config: Config, world: int) -> Layout:
    expert = config.expert_parallel
    degrees: dict[str, Any] = {
        "tp": max(split_degree(config), config.tensor_parallel_size),
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
