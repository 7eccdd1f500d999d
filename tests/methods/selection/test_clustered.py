import warnings
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import drive, federation, layout_of, philox, simulate, small_net
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcat.core.errors import SettingError
from fedcat.methods.average import weighted_mean
from fedcat.methods.base import Context
from fedcat.methods.clusamp import CluSamp
from fedcat.methods.selection.clustered import ClusteredSelector, cut, distances, fill, products_in_parts

SIMILARITIES = ("cosine", "L1", "L2")


def learnt(samples, k, seed=0, similarity="cosine", took_part=None):
    """Return a selector that has seen random changes of some of the clients."""
    rng = np.random.default_rng(seed)
    selector = ClusteredSelector(seed, np.asarray(samples), k, similarity)
    clients = rng.permutation(len(samples))[: len(samples) if took_part is None else took_part]
    selector.learn({int(d): torch.from_numpy(rng.normal(size=7)) for d in clients})
    return selector


def shares(distributions, clients):
    """Return the mean of the distributions for every client, as exact fractions."""
    total = [Fraction(0)] * clients
    for members, amounts in distributions:
        whole = int(amounts.sum())
        for client, amount in zip(members, amounts, strict=True):
            total[client] += Fraction(int(amount), whole) / len(distributions)
    return total


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 10_000_000), min_size=1, max_size=25),
    pick=st.integers(1, 25),
    seed=st.integers(0, 5),
    took_part=st.integers(0, 25),
    similarity=st.sampled_from(SIMILARITIES),
)
def test_the_mean_of_the_distributions_is_each_clients_share(sizes, pick, seed, took_part, similarity):
    k = min(pick, len(sizes))
    selector = learnt(sizes, k, seed, similarity, took_part)
    found = selector.distributions(round=seed)
    assert len(found) == k
    assert all((amounts > 0).all() and len(set(members)) == len(members) for members, amounts in found)
    assert shares(found, len(sizes)) == [Fraction(size, sum(sizes)) for size in sizes]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=2, max_size=20),
    heavy=st.integers(2, 40),
    k=st.integers(2, 12),
    seed=st.integers(0, 3),
)
def test_a_client_that_holds_more_than_a_distribution_fills_those_alone(sizes, heavy, k, seed):
    sizes = [*sizes, heavy * sum(sizes)]
    k = min(k, len(sizes))
    found = learnt(sizes, k, seed).distributions(0)
    assert shares(found, len(sizes)) == [Fraction(size, sum(sizes)) for size in sizes]
    alone = [members for members, _ in found if members.tolist() == [len(sizes) - 1]]
    assert len(alone) >= k * sizes[-1] // sum(sizes)


@settings(max_examples=80, deadline=None)
@given(sizes=st.lists(st.integers(1, 100), min_size=3, max_size=30), pick=st.integers(2, 12), seed=st.integers(0, 5))
def test_no_cluster_weighs_more_than_a_distribution_and_none_could_be_larger(sizes, pick, seed):
    k = max(1, min(pick, sum(sizes) // max(sizes)))
    samples = np.array(sizes)
    tree = learnt(sizes, k, seed).tree()
    clusters = cut(tree, k * samples, sum(sizes))
    assert sorted(np.concatenate(clusters)) == list(range(len(sizes)))
    assert all(k * samples[cluster].sum() <= sum(sizes) for cluster in clusters)
    assert len(clusters) >= k
    parts = {frozenset(cluster.tolist()) for cluster in clusters}
    members = [frozenset([i]) for i in range(len(sizes))]
    for left, right in tree:
        joined = members[left] | members[right]
        members.append(joined)
        if k * samples[list(joined)].sum() <= sum(sizes):
            assert any(joined <= part for part in parts)


def slow(a, b, similarity):
    if similarity == "L1":
        return sum(abs(float(x) - float(y)) for x, y in zip(a, b, strict=True))
    if similarity == "L2":
        return sum((float(x) - float(y)) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5
    dot, aa, bb = (sum(float(x) * float(y) for x, y in zip(p, q, strict=True)) for p, q in ((a, b), (a, a), (b, b)))
    if aa == 0 or bb == 0 or a is b:
        return 0.0
    return float(np.arccos(np.clip(dot / np.sqrt(aa * bb), -1, 1)))


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_the_distance_matrix_against_a_slow_loop_also_when_clients_come_again(similarity):
    rng = np.random.default_rng(3)
    selector = ClusteredSelector(0, np.ones(9, np.int64), 3, similarity)
    changes = {client: np.zeros(11) for client in range(9)}
    for clients in ([4, 1], [7, 4, 2], [1], [0, 7]):
        fresh = {client: rng.normal(size=11) for client in clients}
        changes.update(fresh)
        selector.learn({client: torch.from_numpy(change) for client, change in fresh.items()})
        wanted = [[slow(changes[i], changes[j], similarity) for j in range(9)] for i in range(9)]
        assert np.allclose(selector.matrix(), wanted, atol=1e-7)
    assert np.array_equal(selector.matrix(), selector.matrix().T)
    assert len(selector) == 5


@pytest.mark.parametrize("size", [5, 128, 300])
def test_products_in_parts_are_products(size):
    generator = torch.Generator().manual_seed(0)
    rows, others = (torch.randn(n, size, generator=generator, dtype=torch.float64) for n in (3, 7))
    assert torch.allclose(products_in_parts(rows, others), rows @ others.T, rtol=1e-12)


def test_distances_are_the_same_in_pieces(monkeypatch):
    rows = [torch.from_numpy(row) for row in np.random.default_rng(0).normal(size=(10, 6))]
    whole = distances(torch.stack(rows[:3]), torch.stack(rows), "cosine")
    monkeypatch.setattr("fedcat.methods.selection.clustered.CHUNK", 12)
    assert np.allclose(distances(torch.stack(rows[:3]), torch.stack(rows), "cosine"), whole, atol=1e-14)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("took_part", [0, 1, 6, 12])
def test_the_tree_is_wards_over_the_rows_of_the_whole_matrix(similarity, took_part):
    """Clients that never took part are summed up; the result is what the full matrix gives."""
    from scipy.cluster.hierarchy import cophenet, linkage

    selector = learnt([3] * 12, 4, 1, similarity, took_part)
    with warnings.catch_warnings(action="ignore"):  # SciPy wonders whether the rows are meant as distances
        full = linkage(selector.matrix(), "ward")
    heights = cophenet(full)
    tree = selector.tree()
    if took_part == 12:
        assert np.array_equal(np.sort(tree, 1), np.sort(full[:, :2].astype(int), 1))
    members = [frozenset([i]) for i in range(12)]
    inside = []
    for left, right in tree:
        members.append(members[left] | members[right])
        inside.append(members[-1])
    position = {pair: i for i, pair in enumerate((i, j) for i in range(12) for j in range(i + 1, 12))}
    for cluster in inside:  # each merger joins what Ward joins at one height
        within = [heights[position[i, j]] for i in cluster for j in cluster if i < j]
        across = [heights[position[min(i, j), max(i, j)]] for i in cluster for j in range(12) if j not in cluster]
        assert not across or max(within) <= min(across) + 1e-6


def test_large_federations_do_not_overflow():
    sizes = np.array([2**31, 2**33, 5, 2**31])
    found = fill(sizes, 3, np.array([[0, 3], [2, 4], [1, 5]]), np.random.default_rng(0))
    assert shares(found, 4) == [Fraction(int(size), int(sizes.sum())) for size in sizes]


def test_similar_clients_are_not_drawn_together():
    """Two directions of change, equal sizes, K = 2: every round draws one client of each."""
    selector = ClusteredSelector(0, np.full(8, 10), 2)
    ways = torch.eye(3).double()
    selector.learn({d: ways[d % 2] + 0.01 * ways[2] * d for d in range(8)})
    for round in range(30):
        assert sorted(selector.select(round) % 2) == [0, 1]


def test_draws_follow_the_shares():
    sizes = np.array([1, 2, 3, 4, 30])
    selector = learnt(sizes, 3)
    counts = np.bincount(np.concatenate([selector.select(round) for round in range(4000)]), minlength=5)
    wanted = 4000 * 3 * sizes / sizes.sum()
    assert (abs(counts - wanted) < 4 * np.sqrt(wanted)).all()


def test_clients_count_alike_and_their_changes_are_learnt():
    fed = federation([3, 30, 5, 12, 7, 4])
    layout = layout_of(small_net())
    sim = simulate(CluSamp, fed, layout, k=3, rounds=1)
    jobs = sim.plan()
    replies = sim.engine.train(jobs)
    sim.absorb(replies)
    assert torch.equal(sim.method.row, weighted_mean(torch.stack([r.end for r in replies]), [1, 1, 1]))
    clients = [hop.client for _, hop in jobs]
    assert len(sim.method.selector) == len(set(clients))
    last = {hop.client: reply.end - hop.start for (_, hop), reply in zip(jobs, replies, strict=True)}
    state = sim.method.state()["selector"]
    for client, change in zip(state["clients"], state["changes"], strict=True):
        assert torch.equal(change, last[client])


def test_many_clients_are_warned_of_and_too_many_refused():
    layout = layout_of(small_net())
    context = Context(0, layout, layout.pack(layout.net), np.ones(5_000, np.int64), 5, 1, lambda round: 0.1)
    assert "5,000 clients are clustered in every round" in CluSamp(context).advice(10, 10)[0]
    few = simulate(CluSamp, federation([3, 4]), layout, k=2)
    assert few.method.advice(10, 10) == []
    with pytest.raises(SettingError, match="clients must be at most 20,000 for clustering"):
        CluSamp(replace(context, samples=np.ones(20_001, np.int64)))


def test_bad_options_are_refused():
    words = {"fed": federation([3, 4]), "layout": layout_of(small_net()), "k": 2}
    with pytest.raises(SettingError, match="unknown similarity 'cosinus': did you mean 'cosine'"):
        simulate(CluSamp, options={"similarity": "cosinus"}, **words)
    with pytest.raises(SettingError, match="selector cannot be set"):
        simulate(CluSamp, selector=object(), **words)


def test_draws_come_from_the_rounds_own_streams():
    """Purpose 3 for the draws, one number below the sum of all samples for each distribution; 4 for filling them."""
    sizes = np.array([4, 9, 2, 7, 1, 12, 5])
    selector = learnt(sizes, 3, seed=2)
    for r in range(30):
        distributions = fill(sizes, 3, selector.tree(), philox(2, 4, round=r))
        wanted = []
        for (members, amounts), pick in zip(distributions, philox(2, 3, round=r).integers(40, size=3), strict=True):
            line = [client for client, amount in zip(members, amounts, strict=True) for _ in range(amount)]
            wanted.append(line[pick])
        assert selector.select(r).tolist() == wanted


def test_a_change_that_is_learnt_is_a_copy():
    selector, change = ClusteredSelector(0, np.ones(3, np.int64), 1), torch.ones(4)
    selector.learn({1: change})
    change.zero_()
    assert selector.state()["changes"][0].tolist() == [1.0] * 4


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_restored_selector_goes_on_as_if_nothing_had_happened(similarity):
    whole = learnt([3, 5, 2, 8, 4, 1], 2, similarity=similarity, took_part=4)
    state = whole.state()
    again = ClusteredSelector(0, np.array([3, 5, 2, 8, 4, 1]), 2, similarity)
    again.restore(state)
    for selector in (whole, again):
        selector.learn({client: torch.full((7,), client + 1.0).double() for client in (0, 5, 2)})
    assert np.array_equal(whole.matrix(), again.matrix())
    assert [whole.select(r).tolist() for r in range(9)] == [again.select(r).tolist() for r in range(9)]
    assert len(state["clients"]) == 4


def test_one_client_is_drawn_every_time():
    selector = learnt([5], 1)
    assert [selector.select(r).tolist() for r in range(3)] == [[0]] * 3


def test_the_largest_number_of_clients_is_taken_and_from_3000_on_there_is_advice():
    assert len(ClusteredSelector(0, np.ones(20_000, np.int64), 1)) == 0
    layout = layout_of(small_net())
    for clients, notes in ((2_999, 0), (3_000, 1)):
        context = Context(0, layout, layout.pack(layout.net), np.ones(clients, np.int64), 5, 1, lambda round: 0.1)
        assert len(CluSamp(context).advice(10, 10)) == notes


def test_only_parameters_are_compared():
    """The running statistics of a net are no part of a representative gradient."""
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10))
    sim = simulate(CluSamp, federation([8] * 6), layout_of(net), k=3, rounds=1)
    drive(sim)
    changes = sim.method.state()["selector"]["changes"]
    assert {change.shape for change in changes} == {(64 * 10 + 10 + 20,)}
