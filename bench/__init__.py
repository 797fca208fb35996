"""mizzen beside its peers: the same work in the same command, turn by turn. `docs/bench.md` says how to read it."""
