"""What a user says of a model before it is planned: which modules are one unit, who uses whose parameters."""

from torch import Tensor, nn

from mizzen.ambient import AMBIENT
from mizzen.errors import UsageError
from mizzen.parallel.zero.full.sharded import Sharded


def register_use(module: nn.Module, parameter: Tensor) -> None:
    """Note that a module uses a parameter that it does not hold."""
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"a parameter is wanted; this is a {type(parameter).__name__}")
    if isinstance(parameter, Sharded):
        raise UsageError(
            f"'{type(parameter).label}' is sharded already: register_external_parameter comes before initialize, best "
            "in the __init__ of the module that uses it"
        )
    AMBIENT.externals.set(parameter, module)
