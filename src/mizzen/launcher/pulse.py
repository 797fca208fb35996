"""Which nodes are still heard of. Pure."""

from collections.abc import Sequence
from typing import Final

LOST: Final = 15.0
"""Seconds of silence after which a node is lost."""
DOUBTFUL: Final = 1.5
"""Seconds after which it may be."""
STARTING: Final = 120.0
"""The same for a node that has yet to be heard of for the first time: it starts its ranks."""
LONGEST_LOOK: Final = 1.0
"""What one look adds to a silence at most: who was held up himself must not take it for the silence of others."""


class Pulse:
    """The beats of the nodes of one attempt, each a count that grows for as long as the node lives."""

    def __init__(self, nodes: int, now: float) -> None:
        self._beats = [0] * nodes
        self._silence = [0.0] * nodes
        self._looked = now

    def silent(self, beats: Sequence[int], now: float) -> list[int]:
        """Take in what was counted now; the nodes that have been silent for too long."""
        passed, self._looked = min(now - self._looked, LONGEST_LOOK), now
        for node, (before, count) in enumerate(zip(self._beats, beats, strict=True)):
            self._silence[node] = 0.0 if count > before else self._silence[node] + passed
        self._beats = list(beats)
        return [node for node, count in enumerate(beats) if self._silence[node] > (LOST if count else STARTING)]

    @property
    def doubtful(self) -> list[int]:
        """The nodes that were heard of and may be lost."""
        return [node for node, count in enumerate(self._beats) if count and self._silence[node] > DOUBTFUL]
