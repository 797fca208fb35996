"""A model that comes split among ranks by its own layers, as Megatron's: nothing is cut, but everyone has to know."""

from dataclasses import dataclass, replace

from torch import Tensor

from mizzen.comm.fingerprint import compare, sum_of_bits
from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.config.schema import Config
from mizzen.errors import CommError, PlanError, UsageError
from mizzen.model.home import Home
from mizzen.model.sketch import Drafts, ParameterSketch
from mizzen.parallel.tensor.batches import compare_first_batch
from mizzen.plan.parts import Parts
from mizzen.plan.transform import Transform

SAYS = "tensor_model_parallel, partition_dim and partition_stride"
"""The attributes by which a layer says of its parameters that it has cut them."""


@dataclass(frozen=True, slots=True)
class GivenChoice:
    """How many ranks share the model, and which of its parameters they have parts of."""

    ranks: int
    cut: tuple[str, ...]
    copied: int

    def __str__(self) -> str:
        return f"{len(self.cut)} parameters come cut over tp={self.ranks}, {self.copied} are copies"


class GivenSplit(Transform):
    """Draws the homes of parameters whose layers say that they hold a part. The layers exchange what they need."""

    name = "split by the model"

    def wants(self, config: Config, layout: Layout, drafts: Drafts) -> GivenChoice | None:
        """Believe what the layers say; None where the model does not come split."""
        ranks = config.tensor_parallel_size
        if ranks == 1:
            return None
        parameters = [p for draft in drafts for p in draft.parameters]
        for parameter in parameters:
            _check(parameter, ranks)
        cut = tuple(p.name for p in parameters if p.split is not None and not p.split.is_summed)
        if parameters and not cut:
            raise PlanError(
                f"the model is said to come split over {ranks} tensor-parallel ranks, by an mpu or by "
                f"tensor_parallel_size, but no parameter says so: its layers write {SAYS} on those of which they hold "
                "a part, as Megatron's do. tensor_parallel.autotp_size asks to split a model"
            )
        return GivenChoice(ranks, cut, len(parameters) - len(cut))

    def redraw(self, choice: GivenChoice, drafts: Drafts) -> Drafts:
        """These pieces with the homes that are given."""
        return tuple(
            replace(draft, parameters=tuple(replace(p, home=_home(p, choice.ranks)) for p in draft.parameters))
            for draft in drafts
        )

    def apply(self, parts: Parts, choice: GivenChoice, mesh: Mesh) -> Parts:
        """Nothing is left to do but to make sure that what is not said to be cut are copies, and that of batches."""
        compare_first_batch(parts, mesh)
        for part in parts:
            copies = {name: p for name, p in part.module.named_parameters() if type(p.data) is Tensor}
            sums = {name: str(int(sum_of_bits(p))) for name, p in copies.items() if name not in choice.cut}
            try:
                compare(sums, mesh.group("tp"), mesh.layout)
            except CommError as difference:
                raise UsageError(
                    f"parameters that are not said to be cut differ among the ranks that share a matrix: {difference}. "
                    f"Those of which a rank holds a part have to say so ({SAYS}); others have to begin with the same "
                    "values on these ranks"
                ) from None
        return parts


def _home(parameter: ParameterSketch, ranks: int) -> Home:
    split = parameter.split
    if split is not None and split.is_summed:
        return parameter.home.summed("tp")
    if split is None or split.dim is None:
        return parameter.home
    return parameter.home.cut("tp", split.dim, *split.parts(parameter.shape[split.dim], ranks))


def _check(parameter: ParameterSketch, ranks: int) -> None:
    """Refuse what cannot be put together again."""
    name, split = parameter.name, parameter.split
    if split is None or split.is_summed:
        return
    if split.dim is None or split.dim >= len(parameter.shape):
        raise PlanError(
            f"'{name}' of shape {list(parameter.shape)} says that it is a part of a parameter, but not along which of "
            f"its dimensions: set {SAYS} on it"
        )
    parts = 1 if split.size is not None else ranks
    if split.stride < 1 or parameter.shape[split.dim] % (split.stride * parts):
        raise PlanError(
            f"'{name}' has {parameter.shape[split.dim]} in dimension {split.dim}, all {ranks} parts together, which "
            f"are not {split.stride} runs (partition_stride) of as many each"
        )
