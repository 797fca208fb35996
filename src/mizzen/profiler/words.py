"""Large and small numbers for people, in the form that profiles are known to have."""

from typing import Final

PREFIXES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
PRECISION: Final = 2


def number_to_string(num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`1.5 G`: scaled by its size, or to the prefix that is given."""
    for factor, prefix in PREFIXES:
        if prefix == units if units is not None else abs(num) >= factor:
            return f"{round(num / factor, precision):g} {prefix}"
    return f"{round(num, precision):g} {units or ''}"


def macs_to_string(macs: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`1.5 GMACs`."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`1.5 GFLOPS`; with a unit such as `GFLOPS`, in that."""
    units = units.replace("FLOPS", "") if units is not None else None
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`1.5 GB`."""
    units = units.replace("B", "") if units is not None else None
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`1.5 G`, or `B` for what is counted in billions when that is asked for."""
    if units == "B":
        return number_to_string(params_num, "G", precision).replace("G", "B")
    return number_to_string(params_num, units, precision).strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`1.5 ms`."""
    units = units.removesuffix("s") if units is not None else None
    return f"{number_to_string(duration, units, precision)}s"
