"""The roll call: before torch connects the ranks, each of them comes to the store, and who does not come is named.

The store itself is `meeting.py`'s business.

[Note: fresh names]
Rank 0 publishes an offer with a fresh name; each rank answers under that name with a fresh name of its own; when all
have answered, rank 0 publishes the list of answers, and who finds its own name there is in. The default process group
then keeps its addresses under the name of the offer. This matters when the store outlives a rank: the agent of torchrun
keeps one store for all its restarts, where a new rank would read the addresses that dead ranks have left behind, and
fail with "Connection refused" (torch 2.13). A leftover offer, answer or list names nobody who is alive, so a new rank
waits for the new one.
"""

import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn, TypedDict
from uuid import uuid4

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from mizzen.comm.signed import SignedStore
from mizzen.environment import World, environ, ranks_key
from mizzen.errors import CommError

SLICE: Final = timedelta(seconds=1)
"""How long one look at the store may block."""
PAUSE: Final = 0.05
"""Seconds between two questions within a look, for the first few hundred ranks."""
QUESTIONS: Final = 4096
"""How many questions a second the store may get from all ranks together."""
GRACE: Final = 5.0
"""Seconds by which the others outwait rank 0, so that all of them give rank 0's account of who is missing."""
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
SHOWN: Final = 16


class Answer(TypedDict):
    """What a rank says of itself."""

    id: str
    rank: int
    size: int
    host: str


class Lost(CommError):
    """The store went away while the ranks gathered."""


@dataclass(frozen=True, slots=True)
class Roll:
    """Everybody has come: the fresh name of this meeting, and the host of every rank."""

    name: str
    hosts: tuple[str, ...]

    @property
    def spread(self) -> int:
        """How many hosts the ranks are on."""
        return len(set(self.hosts))

    def settle(self, world: World, env: Mapping[str, str]) -> World:
        """The world with the local rank counted out, where no launcher has said it."""
        if "LOCAL_RANK" in env or world.source not in ("arguments", "torchrun"):
            return world
        here = self.hosts[world.rank]
        return replace(world, local_rank=self.hosts[: world.rank].count(here), local_size=self.hosts.count(here))


def call_roll(store: Store, world: World, timeout: timedelta, where: str) -> Roll:
    """Wait until every rank of the world has come to the store; who is missing is named by all who are there."""
    shared: Any = PrefixStore("mizzen/roll", store)
    party = _Party(SignedStore(shared, ranks_key(environ())), world, time.monotonic() + timeout.total_seconds(), where)
    own = Answer(id=uuid4().hex, rank=world.rank, size=world.size, host=_host())
    try:
        return _call(party, own) if world.rank == 0 else _come(party, own)
    except DistError as error:
        raise Lost(
            f"{party} lost the store at {where} while the ranks gathered: the process that hosts it has left ({error})"
        ) from error


@dataclass(frozen=True, slots=True)
class _Party:
    """One rank at the meeting."""

    store: SignedStore
    world: World
    deadline: float
    where: str

    def __str__(self) -> str:
        return f"rank {self.world.rank} of {self.world.size}"

    def sees(self, *keys: str) -> bool:
        """Whether all keys are there within one slice."""
        until = time.monotonic() + SLICE.total_seconds()
        while not self.store.check(list(keys)):
            if time.monotonic() > until:
                return False
            # A wait of the store's own that ends in vain writes warnings to standard error.
            time.sleep(max(PAUSE, self.world.size / QUESTIONS))
        return True


def _call(party: _Party, own: Answer) -> Roll:
    """Rank 0's part: offer, collect the answers, publish them."""
    store, size, name = party.store, party.world.size, own["id"]
    store.set("offer", json.dumps({"id": name, "size": size}))
    answers = {0: own}
    while missing := [rank for rank in range(size) if rank not in answers]:
        have_all_come = party.sees(*(_answer(name, rank) for rank in missing))
        for rank in missing:
            if have_all_come or store.check([_answer(name, rank)]):
                answers[rank] = json.loads(store.get(_answer(name, rank)))
        if store.check([_surplus(name)]):
            extra = json.loads(store.get(_surplus(name)))
            answers[extra["rank"]] = extra
        for rank, answer in answers.items():
            if answer["size"] != size:
                _refuse(party, answers, _disagreement(party, rank, answer))
        if len(answers) < size and time.monotonic() > party.deadline:
            _refuse(party, answers, _absence(party, answers))
    row = [answers[rank] for rank in range(size)]
    store.set(_result(name), json.dumps({"row": row}))
    return Roll(name, tuple(answer["host"] for answer in row))


def _refuse(party: _Party, answers: Mapping[int, Answer], message: str) -> NoReturn:
    """Fail together with all who have answered."""
    party.store.set(_result(answers[0]["id"]), json.dumps({"error": message, "row": list(answers.values())}))
    time.sleep(SLICE.total_seconds() / 2)  # this process may host the store: let the others read it
    raise CommError(message)


def _disagreement(party: _Party, rank: int, answer: Answer) -> str:
    return (
        f"rank 0 expects {party.world.size} ranks at {party.where}, but rank {rank} on {_short(answer['host'])} "
        f"expects {answer['size']}: start all ranks with the same WORLD_SIZE"
    )


def _absence(party: _Party, answers: Mapping[int, Answer]) -> str:
    missing = [str(rank) for rank in range(party.world.size) if rank not in answers]
    hosts = sorted({_short(entry["host"]) for entry in answers.values()})
    return (
        f"{party.world.size} ranks were waited for at {party.where}, and {len(answers)} have come in time (on "
        f"{_some(hosts)}); missing: rank {_some(missing)}. See whether those were started, and with the same "
        "MASTER_ADDR, MASTER_PORT and WORLD_SIZE; init_distributed(timeout=...) or MIZZEN_TIMEOUT waits longer"
    )


def _come(party: _Party, own: Answer) -> Roll:
    """Every other rank's part: answer every offer until the result of one of them has our name."""
    store, answered = party.store, set[str]()
    while time.monotonic() < party.deadline + GRACE:
        if not party.sees("offer"):
            continue
        offer = json.loads(store.get("offer"))
        name: str = offer["id"]
        if name not in answered:
            answered.add(name)
            key = _answer(name, own["rank"]) if own["rank"] < offer["size"] else _surplus(name)
            store.set(key, json.dumps(own))
        if not party.sees(_result(name)):
            continue
        result = json.loads(store.get(_result(name)))
        if all(answer["id"] != own["id"] for answer in result["row"]):
            time.sleep(0.05)  # that was a meeting of others, before our time
            continue
        if "error" in result:
            raise CommError(result["error"])
        return Roll(name, tuple(answer["host"] for answer in result["row"]))
    if not answered:
        raise CommError(f"{party} waited for rank 0 at {party.where}, but it has not come: see whether it was started")
    raise CommError(
        f"{party} came to {party.where}, but rank 0 has not counted it: another process has come as rank "
        f"{party.world.rank}, or rank 0 has ended. Check the ranks that the launcher gives out"
    )


def _answer(name: str, rank: int) -> str:
    return f"answer/{name}/{rank}"


def _surplus(name: str) -> str:
    """Where a rank answers that rank 0 does not count on."""
    return f"surplus/{name}"


def _result(name: str) -> str:
    return f"result/{name}"


def _host() -> str:
    """A name of this host's own: clones of one image often share the first part, containers of one host the second."""
    return f"{socket.gethostname()}/{BOOT.read_text().strip() if BOOT.exists() else ''}"


def _short(host: str) -> str:
    return host.partition("/")[0]


def _some(words: Sequence[str]) -> str:
    shown = ", ".join(words[:SHOWN])
    return shown if len(words) <= SHOWN else f"{shown} and {len(words) - SHOWN} more"
