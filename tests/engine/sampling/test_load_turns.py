"""Turns at a replica's places for adapter versions: by shares, and never more than a replica has."""

from collections import Counter

from engine.sampling.load_turns import LoadTurns


def test_owners_take_turns_by_their_shares() -> None:
    turns: LoadTurns[str] = LoadTurns(places=64)
    for number in range(12):
        turns.add(f"heavy-{number}", "heavy", 3.0)
        turns.add(f"light-{number}", "light", 1.0)
    taken = [turns.take({}) for _ in range(16)]
    owners = [one[1] for one in taken if one is not None]
    assert Counter(owners) == {"heavy": 12, "light": 4}
    assert [one[0] for one in taken if one is not None and one[1] == "light"] == [f"light-{n}" for n in range(4)]


def test_an_owner_that_comes_is_next_and_is_not_put_off_by_one_that_holds_all_it_may() -> None:
    turns: LoadTurns[str] = LoadTurns(places=9)
    for number in range(20):
        turns.add(f"flood-{number}", "flood", 1.0)
    held: Counter[str] = Counter()
    while (taken := turns.take(held)) is not None:
        held[taken[1]] += 1
    assert held == {"flood": 8}
    turns.add("theirs", "light", 1.0)
    assert turns.take(held) == ("theirs", "light")
    assert turns.take(held + Counter(light=1)) is None
    assert turns.take(held - Counter(flood=4)) == ("flood-8", "flood")


def test_a_version_of_two_owners_is_taken_once() -> None:
    turns: LoadTurns[str] = LoadTurns(places=64)
    turns.add("one", "cats", 1.0)
    turns.add("one", "dogs", 1.0)
    assert turns.take({}) is not None
    assert (turns.take({}), bool(turns)) == (None, False)
    turns.add("gone", "cats", 1.0)
    turns.discard("gone")
    assert turns.take({}) is None
