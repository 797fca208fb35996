"""Errors about an argument of a rule that is out of its range."""


def check_range(name: str, value: float, *, low: float, high: float = float("inf")) -> None:
    """Refuse an argument outside of [low, high)."""
    if not low <= value < high:
        bound = f"in [{low:g}, {high:g})" if high != float("inf") else f"at least {low:g}"
        raise ValueError(f"{name} is {value:g}; it must be {bound}")


def check_betas(betas: tuple[float, float]) -> None:
    """Refuse decay rates outside of [0, 1)."""
    for number, beta in enumerate(betas):
        check_range(f"betas[{number}]", beta, low=0, high=1)
