"""Values in the store of the ranks, signed with the key that `mizzen run` gives to the ranks of a job."""

from mizzen.comm.backend import Store
from mizzen.errors import CommError
from mizzen.network import PROOF, is_proof, prove


class SignedStore:
    """A store of torch whose values are signed: one that somebody else has written is an error, not a value.

    The name of a key is signed with its value, so that a value cannot be moved to another key. Who can reach the store
    may still delete a value, or put an older one back. Without a key, as under other launchers, the signature only
    tells values of ours from others.
    """

    def __init__(self, store: Store, key: bytes) -> None:
        self._store, self._key = store, key

    def set(self, key: str, value: str | bytes, /) -> None:
        """Sign a value and write it over the one before."""
        self._store.set(key, self._sign(key, value))

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these were written."""
        return self._store.check(keys)

    def get(self, key: str, /) -> bytes:
        """What was last written; CommError where that was not one of us."""
        return self._read(key, self._store.get(key))

    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes:
        """Write `desired` where `expected` stands, or nothing where that is empty; what stands there then."""
        before = self._sign(key, expected) if expected else b""
        return self._read(key, self._store.compare_set(key, before, self._sign(key, desired)))

    def _sign(self, key: str, value: str | bytes) -> bytes:
        body = value.encode() if isinstance(value, str) else value
        return prove(self._key, key.encode(), body) + body

    def _read(self, key: str, found: bytes) -> bytes:
        proof, body = bytes(found[:PROOF]), bytes(found[PROOF:])
        if not is_proof(proof, self._key, key.encode(), body):
            raise CommError(
                f"what the store of this job holds under {key!r} was not written by a rank of this job: somebody else "
                "can reach its port, or the ranks were started with different values of MIZZEN_KEY"
            )
        return body
