"""What an engine asks of a store stays few, and a released store has nothing."""

from mizzen.plan.parts import Store, StoreContents

MOST = 15


def test_a_store_has_few_members():
    members = [name for name in (*vars(Store), *Store.__annotations__) if not name.startswith("_")]
    assert len(members) <= MOST, f"{len(members)} members, where {MOST} were enough: {sorted(members)}"


def test_empty_contents_hold_nothing():
    contents = StoreContents()
    assert not any(getattr(contents, name) for name in StoreContents.__dataclass_fields__)
