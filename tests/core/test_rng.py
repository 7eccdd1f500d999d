import numpy as np

from fedcat.core.rng import Purpose, random_stream, torch_seed


def test_an_address_gives_the_same_numbers_every_time():
    assert np.array_equal(
        random_stream(3, Purpose.BATCHES, 2, 7, 1).random(50), random_stream(3, Purpose.BATCHES, 2, 7, 1).random(50)
    )


def test_every_part_of_the_address_matters():
    base = {"seed": 3, "purpose": Purpose.BATCHES, "round": 2, "client": 7, "visit": 1}
    first = random_stream(**base).random(8)
    for change in ({"seed": 4}, {"purpose": Purpose.SELECT}, {"round": 3}, {"client": 8}, {"visit": 2}):
        assert not np.isin(random_stream(**{**base, **change}).random(8), first).any(), change


def test_neighbouring_addresses_do_not_overlap_in_long_draws():
    rounds = [random_stream(0, Purpose.BATCHES, r, d).random(1000) for r in range(3) for d in range(3)]
    assert len(np.unique(np.concatenate(rounds))) == 9000


def test_the_numbers_of_the_purposes_are_a_file_format():
    assert {p.name: p.value for p in Purpose} == {
        "PARTITION": 1,
        "INITIAL": 2,
        "SELECT": 3,
        "GROUP": 4,
        "BATCHES": 5,
        "RULE": 6,
        "NET": 7,
        "SPLIT": 8,
        "SERVER": 9,
        "WRITERS": 10,
    }


def test_the_stream_itself_is_a_file_format():
    drawn = random_stream(1, Purpose.SELECT, round=2, client=3, visit=4).integers(2**32, size=4)
    assert drawn.tolist() == [3727555633, 3184613926, 3593592057, 3062523007]


def test_large_seeds_are_used_in_full():
    assert random_stream(2**63 - 1, Purpose.SELECT).random() != random_stream(2**63 - 2, Purpose.SELECT).random()
    assert 0 <= torch_seed(random_stream(0, Purpose.INITIAL)) < 2**63
