import torch

from fedcat.methods.client_memory import ClientMemory


def memory(value):
    return {"c": torch.full((3,), value)}


def test_a_client_that_never_took_part_holds_the_blank():
    kept = ClientMemory(memory(7.0))
    kept.commit(4, memory(1.0))
    assert kept[4]["c"].tolist() == [1.0] * 3
    assert kept[5]["c"].tolist() == [7.0] * 3
    assert len(kept) == 1


def test_the_last_commit_of_a_client_counts():
    kept = ClientMemory(memory(0.0))
    kept.commit(4, memory(1.0))
    kept.commit(4, {"d": torch.ones(2)})
    assert list(kept[4]) == ["d"]
    assert len(kept) == 1


def test_what_is_committed_is_a_copy():
    """Engines return views of memory that the next launch overwrites."""
    kept, shared = ClientMemory(memory(0.0)), torch.ones(2, 3)
    kept.commit(4, {"c": shared[0]})
    shared.zero_()
    assert kept[4]["c"].tolist() == [1.0] * 3


def test_a_blank_that_the_caller_adds_to_stays_as_it_was():
    blank = memory(0.0)
    kept = ClientMemory(blank)
    blank["more"] = torch.ones(1)
    assert list(kept[0]) == ["c"]


def test_a_state_holds_every_client_and_does_not_follow_later_commits():
    kept = ClientMemory(memory(0.0))
    for client in (4, 11):
        kept.commit(client, memory(float(client)))
    state = kept.state()
    kept.commit(4, memory(5.0))
    other = ClientMemory(memory(0.0))
    other.commit(9, memory(9.0))
    other.restore(state)
    other.commit(11, memory(3.0))
    assert [other[client]["c"][0].item() for client in (4, 11, 9)] == [4.0, 3.0, 0.0]
    assert {client: held["c"][0].item() for client, held in state.items()} == {"4": 4.0, "11": 11.0}
    assert len(other) == 2
