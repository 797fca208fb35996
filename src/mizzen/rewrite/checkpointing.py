"""What stands behind `mizzen.checkpointing`: calls that get neither an engine nor a configuration.

So what they work with belongs to the process: how inputs are kept, and the named random streams.
"""

from collections.abc import Mapping
from typing import Any, Final

from mizzen.accelerator import get_accelerator
from mizzen.ambient import AMBIENT
from mizzen.config.execution import ActivationCheckpointingConfig
from mizzen.config.section import fate_of
from mizzen.errors import NotBuilt
from mizzen.log import warn_once
from mizzen.rewrite.replay import Keeping
from mizzen.rewrite.streams import TENSOR_PARALLEL, RandomStreams

OFFSET: Final = 2718
"""Between the default seed and that of the first tensor-parallel rank, as in Megatron."""
ROLES: Final = ("tensor_model", "slice", "model")
"""How an mpu object may call tensor parallelism, the plainest name first."""


class Checkpointing:
    """The state of the process; `current()` is the one there is."""

    def __init__(self) -> None:
        self.keeping: Keeping | None = None
        """What `configure`, or the first engine whose configuration says so, has asked for."""
        self.streams = RandomStreams()
        self.rank, self.ranks = 0, 1
        """This rank's place among the tensor-parallel ranks, and their number."""

    @classmethod
    def current(cls) -> "Checkpointing":
        """The one of this process."""
        if AMBIENT.checkpointing is None:
            AMBIENT.checkpointing = cls()
        found: Checkpointing = AMBIENT.checkpointing
        return found

    def configure(self, section: ActivationCheckpointingConfig, given: Mapping[str, Any], mpu: Any) -> None:
        """Keep inputs as a section says, or as arguments say, by the names of its keys; None says nothing."""
        arguments = {key: value for key, value in given.items() if value is not None}
        for key, value in arguments.items():
            if value and (reason := fate_of(ActivationCheckpointingConfig.model_fields[key]).reason):
                warn_once(f"checkpointing.configure: {key} has no effect here: {reason}")
        asked = section.model_copy(update=arguments)
        self.rank, self.ranks = _ask(mpu, "rank", 0), _ask(mpu, "world_size", 1)
        self.partition(asked.partition_activations)
        self.keeping = Keeping(on_host=asked.cpu_checkpointing)

    def partition(self, is_asked: bool) -> None:
        """Refuse to split inputs over ranks; one rank has nothing to split."""
        if is_asked and self.ranks > 1:
            raise NotBuilt(
                f"splitting the inputs of checkpoints over {self.ranks} tensor-parallel ranks is not built yet; leave "
                "partition_activations out"
            )

    def seed(self, seed: int) -> None:
        """Seed the device alike on all tensor-parallel ranks, and a stream that differs between them."""
        get_accelerator().seed(seed)
        self.streams.reset()
        self.streams.add(TENSOR_PARALLEL, self._seed_of_rank(seed))

    def reseed(self, seed: int) -> None:
        """Seed only the stream that differs."""
        self.streams.reseed(TENSOR_PARALLEL, self._seed_of_rank(seed))

    def _seed_of_rank(self, seed: int) -> int:
        return seed + OFFSET + self.rank


def _ask(mpu: Any, question: str, default: int) -> int:
    methods = (getattr(mpu, f"get_{role}_parallel_{question}", None) for role in ROLES)
    return next((int(method()) for method in methods if callable(method)), default)
