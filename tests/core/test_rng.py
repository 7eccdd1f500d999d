import numpy as np
import pytest
import torch
from helpers import digits_net, philox

from fedcat.core.rng import Purpose, random_stream, torch_seed
from fedcat.models.layout import Layout
from fedcat.runs.build import Builder


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
        "HOLD_OUT": 11,
        "AUGMENT": 12,
        "FAULT": 13,
        "TRAITS": 14,
        "RETRY": 15,
    }


def test_the_stream_itself_is_a_file_format():
    drawn = random_stream(1, Purpose.SELECT, round=2, client=3, visit=4).integers(2**32, size=4)
    assert drawn.tolist() == [3727555633, 3184613926, 3593592057, 3062523007]


def test_large_seeds_are_used_in_full():
    assert random_stream(2**63 - 1, Purpose.SELECT).random() != random_stream(2**63 - 2, Purpose.SELECT).random()
    assert 0 <= torch_seed(random_stream(0, Purpose.INITIAL)) < 2**63


@pytest.mark.parametrize("purpose", Purpose)
def test_a_stream_is_numpys_philox_with_the_documented_key_and_counter(purpose):
    keys = [(0, 0, 0, 0), (5, 0, 0, 0), (0, 5, 0, 0), (0, 0, 5, 0), (0, 0, 0, 5), (2**63 - 1, 1000, 180, 3)]
    for seed, round, client, visit in keys:
        drawn = random_stream(seed, purpose, round, client, visit).integers(2**63, size=5)
        assert np.array_equal(drawn, philox(seed, purpose.value, round, client, visit).integers(2**63, size=5))


@pytest.mark.parametrize(
    ("purpose", "plain", "keyed"),
    [
        ("PARTITION", [975125399, 813354060, 297378980], [771928891, 335287341, 367015699]),
        ("INITIAL", [624939680, 814433577, 439680804], [400138218, 745132348, 575660630]),
        ("SELECT", [120393489, 475159160, 440056496], [261143208, 191483690, 843837076]),
        ("GROUP", [904824883, 429156344, 866034296], [535873689, 771179767, 25456826]),
        ("BATCHES", [444572558, 587582974, 912281079], [886583533, 91409832, 447132914]),
        ("RULE", [527631887, 516876609, 717853390], [98095736, 583274904, 961617234]),
        ("NET", [811573404, 584496194, 44190333], [221011581, 818998876, 308644950]),
        ("SPLIT", [693286002, 848075397, 133387363], [537853954, 994751657, 686446969]),
        ("SERVER", [885626957, 801100972, 543816751], [394387181, 72471993, 272424918]),
        ("WRITERS", [504529097, 959141708, 272284846], [559401860, 96509180, 737672295]),
        ("HOLD_OUT", [388342316, 199643003, 94036363], [545780448, 529561680, 7996823]),
        ("AUGMENT", [929480140, 596938883, 853668984], [448891578, 718958779, 44135429]),
    ],
)
def test_the_numbers_of_every_purpose_are_a_file_format(purpose, plain, keyed):
    assert random_stream(0, Purpose[purpose]).integers(10**9, size=3).tolist() == plain
    assert random_stream(7, Purpose[purpose], round=1, client=2, visit=3).integers(10**9, size=3).tolist() == keyed


def test_pytorchs_seed_is_the_streams_first_number_below_two_to_the_63():
    assert torch_seed(philox(3, 2)) == int(philox(3, 2).integers(2**63)) == 7092429982412796981


def test_the_initial_weights_are_made_under_the_seeds_own_stream():
    """Purpose 2, and the run's seed even where the data has another."""
    given = {"dataset": "digits", "method": "fedavg", "rounds": 1, "workers": 1}
    for seed in (0, 7):
        sim = Builder().build({**given, "seed": seed, "data_seed": 4})
        net = digits_net(torch_seed(philox(seed, 2)))
        assert torch.equal(sim.method.models()["global"].cpu(), Layout(net).pack(net))
