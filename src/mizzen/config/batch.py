"""The batch triad: train = micro * accumulation * dp, in whole numbers. `elasticity.py` computes elastic batches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mizzen.config.schema import Config
from mizzen.errors import ConfigError, LayoutError

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
