import numpy as np
import pytest
from helpers import philox

from fedcat.core.errors import SettingError
from fedcat.methods.selection import SELECTORS, FunctionSelector, check_selection, make_selector, uniform
from fedcat.methods.selection.grouped import CountTable, GroupedSelector

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


CASES = [(12, 3, 0.5, 1), (13, 4, 0.3, 2), (7, 7, 1.0, 1), (9, 1, 0.0, 3), (23, 5, 0.7, 0.4)]


@st.composite
def grouped(draw):
    clients = draw(st.integers(1, 40))
    k = draw(st.integers(1, clients))
    epsilon = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    period = k * draw(st.integers(1, 3))
    return GroupedSelector(draw(st.integers(0, 2**63 - 1)), clients, k, epsilon, period)


@hypothesis.given(grouped(), st.integers(1, 30))
@hypothesis.settings(max_examples=80, deadline=None)
def test_every_group_gives_one_client_and_counts_add_up(selector, rounds):
    totals = np.zeros(selector.k, int)
    for r in range(rounds):
        groups = selector.groups(r)
        assert sorted(np.concatenate(groups).tolist()) == list(range(selector.clients))
        sizes = [len(g) for g in groups]
        assert max(sizes) - min(sizes) <= 1
        chosen = selector.select(r)
        assert all(client in group for client, group in zip(chosen, groups, strict=True))
        totals[r % selector.k] += selector.k
        table = selector.table.dense(selector.k)
        assert table.sum(0).tolist() == totals.tolist()


@hypothesis.given(grouped())
@hypothesis.settings(max_examples=40, deadline=None)
def test_groups_change_only_with_the_period(selector):
    first = [g.tolist() for g in selector.groups(0)]
    assert [g.tolist() for g in selector.groups(selector.period - 1)] == first
    if selector.clients > 10:
        assert [sorted(g.tolist()) for g in selector.groups(selector.period)] != [sorted(g) for g in first] or (
            selector.k in (1, selector.clients)
        )


def test_the_largest_weight_goes_to_the_client_that_was_chosen_least():
    selector = GroupedSelector(0, 12, 1, epsilon=1.0)
    chosen = [int(selector.select(r)[0]) for r in range(24)]
    assert sorted(chosen[:12]) == list(range(12))
    assert sorted(chosen[12:]) == list(range(12))


def test_ties_are_broken_at_random():
    firsts = {int(GroupedSelector(seed, 12, 1, epsilon=1.0).select(0)[0]) for seed in range(200)}
    assert firsts == set(range(12))


def test_draws_follow_the_weights():
    """Counts 0, 0, 3 and 8 give weights 1, 1, 1/2 and 1/3."""
    picked = np.zeros(4)
    for seed in range(4000):
        selector = GroupedSelector(seed, 4, 1, epsilon=0.0)
        selector.table.restore({"0": {"clients": [2, 3], "counts": [3, 8]}})
        picked[selector.select(0)[0]] += 1
    weights = np.array([1, 1, 1 / 2, 1 / 3])
    expected = 4000 * weights / weights.sum()
    assert np.abs(picked - expected).max() < 4 * np.sqrt(expected.max())


def slow(seed, clients, k, epsilon, period, rounds):
    """Algorithm 3 by loops, with the random numbers of the documented streams: groups from 4, picks from 3."""
    counts = np.zeros((clients, k), int)
    for r in range(rounds):
        order = philox(seed, 4, round=r // period * period).permutation(clients).tolist()
        groups = [order[i * (clients // k) + min(i, clients % k) :] for i in range(k)]
        groups = [group[: clients // k + (i < clients % k)] for i, group in enumerate(groups)]
        rng = philox(seed, 3, round=r)
        coins, picks = rng.random(k), rng.random(k)
        chosen = []
        for group, coin, pick in zip(groups, coins, picks, strict=True):
            weights = [(counts[client, r % k] + 1) ** -0.5 for client in group]
            if coin < epsilon:
                weights = [float(weight == max(weights)) for weight in weights]
            place, passed = 0, weights[0]
            while passed <= pick * sum(weights):
                place += 1
                passed += weights[place]
            chosen.append(group[place])
        counts[chosen, r % k] += 1
        yield groups, chosen, counts


@pytest.mark.parametrize(("clients", "k", "epsilon", "periods"), CASES)
def test_it_is_algorithm_3_with_the_documented_random_streams(clients, k, epsilon, periods):
    for seed in range(4):
        selector = GroupedSelector(seed, clients, k, epsilon, round(periods * k))
        for r, (groups, chosen, counts) in enumerate(slow(seed, clients, k, epsilon, round(periods * k), 40)):
            assert [group.tolist() for group in selector.groups(r)] == groups
            assert selector.select(r).tolist() == chosen
            assert np.array_equal(selector.table.dense(k), counts)


def test_by_default_half_of_the_picks_are_greedy_and_groups_last_k_rounds():
    selector = GroupedSelector(0, 12, 3)
    assert (selector.epsilon, selector.period) == (0.5, 3)


def largest_chosen(seed, epsilon, k=5, size=20):
    """Tell for each group whether its one client of the largest weight, 1 beside 19 of 1/2, was chosen."""
    selector = GroupedSelector(seed, k * size, k, epsilon)
    least = [group[seed % size] for group in selector.groups(0)]
    others = sorted(set(range(k * size)) - set(least))
    selector.table.restore({"0": {"clients": others, "counts": [3] * len(others)}})
    return selector.select(0) == least


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 0.8, 1.0])
def test_each_group_tosses_its_own_coin_of_epsilon(epsilon):
    """The largest weight is taken with probability epsilon, and by weight with probability 1 / (1 + 19 / 2)."""
    hits = np.array([largest_chosen(seed, epsilon) for seed in range(600)])
    rate = epsilon + (1 - epsilon) / 10.5
    assert abs(hits.mean() - rate) <= 4 * np.sqrt(rate * (1 - rate) / hits.size)
    assert (abs(hits.mean(0) - rate) <= 4 * np.sqrt(rate * (1 - rate) / len(hits))).all()
    binomial = 5 * rate * (1 - rate)  # the variance if the groups are independent
    assert 0.75 * binomial <= hits.sum(1).var() <= 1.25 * binomial


def test_the_weights_are_one_over_the_root_of_the_count_plus_one_as_rates():
    """Counts 0 to 15 at this position; counts at another position do not matter."""
    counts, picked = np.arange(16), np.zeros(16)
    for seed in range(6000):
        selector = GroupedSelector(seed, 16, 1, epsilon=0.0)
        stored = {"clients": counts.tolist(), "counts": counts.tolist()}
        selector.table.restore({"0": stored, "1": {"clients": [3], "counts": [99]}})
        picked[selector.select(0)[0]] += 1
    rates = (counts + 1.0) ** -0.5
    expected = 6000 * rates / rates.sum()
    assert (abs(picked - expected) <= 4 * np.sqrt(expected)).all()


@pytest.mark.parametrize("scale", [0.001, 1.0, 1000.0])
def test_the_smallest_and_the_largest_random_number_pick_the_first_and_the_last_of_a_group(scale):
    """Of those with a weight: a number of 0 picks nobody without, and none reaches the next group."""
    selector = GroupedSelector(0, 6, 2)
    weight = scale * np.array([0.0, 0.7, 0.1, 3e-14, 3e-14, 0.0])
    assert selector._draw(weight, np.zeros(2)).tolist() == [1, 3]
    assert selector._draw(weight, np.full(2, 1 - 2**-53)).tolist() == [2, 4]


def test_counts_are_kept_by_position_in_the_cycle():
    selector = GroupedSelector(0, 6, 3, epsilon=1.0)
    for r in range(3):
        selector.select(r)
    assert selector.table.dense(3).sum(0).tolist() == [3, 3, 3]
    ids, counts = selector.table.column(1)
    assert len(ids) == 3
    assert counts.tolist() == [1, 1, 1]


def test_a_restored_selector_goes_on_as_if_nothing_had_happened():
    whole = GroupedSelector(4, 30, 5)
    expected = [whole.select(r).tolist() for r in range(20)]
    first = GroupedSelector(4, 30, 5)
    for r in range(13):
        first.select(r)
    second = GroupedSelector(4, 30, 5)
    second.restore(first.state())
    assert [second.select(r).tolist() for r in range(13, 20)] == expected[13:]


def test_the_sparse_table_counts_like_a_dense_one():
    rng = np.random.default_rng(0)
    table, dense = CountTable(20), np.zeros((20, 4), int)
    for _ in range(100):
        position, chosen = int(rng.integers(4)), rng.choice(20, 6, replace=False)
        table.increment(position, chosen)
        dense[chosen, position] += 1
    assert np.array_equal(table.dense(4), dense)
    assert table.nbytes() == 12 * np.count_nonzero(dense)


def test_a_large_table_takes_little_room():
    selector = GroupedSelector(0, 1_000_000, 1000)
    for r in range(3):
        selector.select(r)
    assert selector.table.nbytes() == 3 * 1000 * 12


def test_uniform_selection_draws_without_replacement_and_by_round():
    selector = FunctionSelector(uniform, 0, np.ones(30, int), 10)
    rounds = [selector.select(r) for r in range(50)]
    assert all(len(set(r.tolist())) == 10 for r in rounds)
    assert rounds[3].tolist() == selector.select(3).tolist()
    assert len({tuple(r.tolist()) for r in rounds}) == 50


SAMPLES = np.array([1, 5, 2, 8, 4])
SHARES = SAMPLES / 20


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("uniform", {"replace": False}),
        ("by-samples", {"replace": False, "p": SHARES}),
        ("multinomial", {"replace": True, "p": SHARES}),
    ],
)
def test_a_selector_draws_as_it_says_from_the_rounds_own_stream(name, words):
    selector = make_selector(SELECTORS.get(name), 6, SAMPLES, 3)
    for r in range(20):
        assert selector.select(r).tolist() == philox(6, 3, round=r).choice(5, size=3, **words).tolist()


@pytest.mark.parametrize("name", ["uniform", "by-samples"])
def test_without_replacement_as_many_as_there_are_is_everybody(name):
    selector = make_selector(SELECTORS.get(name), 0, SAMPLES, 5)
    assert all(sorted(selector.select(r)) == [0, 1, 2, 3, 4] for r in range(50))


def test_multinomial_draws_are_independent_and_follow_the_samples():
    selector = make_selector(SELECTORS.get("multinomial"), 0, SAMPLES, 3)
    drawn = np.array([selector.select(r) for r in range(2000)])
    counts = np.bincount(drawn.ravel())
    assert (abs(counts - 6000 * SHARES) <= 4 * np.sqrt(6000 * SHARES)).all()
    twice = np.mean(drawn[:, 0] == drawn[:, 1])
    assert twice == pytest.approx((SHARES**2).sum(), abs=0.04)


def test_selectors_by_name():
    assert [name for name, _ in SELECTORS] == ["by-samples", "multinomial", "uniform"]


def test_selection_by_samples_prefers_large_clients():
    samples = np.array([1] * 9 + [91])
    selector = make_selector(SELECTORS.get("by-samples"), 0, samples, 1)
    assert np.mean([selector.select(r)[0] == 9 for r in range(300)]) == pytest.approx(0.91, abs=0.06)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([1, 2], "must return 3 clients"),
        ([[1, 2, 3]], r"of shape \(1, 3\)"),
        ([0.5, 1.0, 2.0], "an array of float64"),
        ([0, 1, 10], r"in 0 \.\. 9, got 0 \.\. 10"),
        ([-1, 1, 2], r"got -1 \.\. 2"),
    ],
)
def test_a_users_bad_choice_is_refused(chosen, message):
    with pytest.raises(SettingError, match=message):
        check_selection(chosen, 10, 3)


def test_the_first_and_the_last_client_may_be_chosen_and_come_back_as_numbers():
    for kind in (np.int64, np.uint8):
        found = check_selection(np.array([0, 9, 9], kind), 10, 3)
        assert found == [0, 9, 9]
        assert type(found[0]) is int


def test_a_selector_is_a_function_or_a_class():
    class Mine:
        def __init__(self, seed, samples, k):
            self.k = k

    assert make_selector(Mine, 0, np.ones(4, int), 2).k == 2
    with pytest.raises(SettingError, match=r"selector must be a function of \(round, rng, samples, k\)"):
        make_selector(lambda round, rng: [0, 1], 0, np.ones(4, int), 2)
    with pytest.raises(SettingError, match="selector must be a function or a class, got 3"):
        make_selector(3, 0, np.ones(4, int), 2)
