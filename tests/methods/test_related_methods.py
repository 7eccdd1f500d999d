"""FedCluster and cyclic weight transfer."""

import numpy as np
import pytest
import torch
from helpers import (
    drive,
    federation,
    layout_of,
    philox,
    simulate,
    small_net,
    step,
)

from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg
from fedcat.methods.average import weighted_mean
from fedcat.methods.cyclic import Cyclic
from fedcat.methods.fedcluster import FedCluster
from fedcat.protocol.reply import Reply, Status

FED = federation([3, 9, 5, 12, 7, 4, 8, 6, 5, 10, 11])
LAYOUT = layout_of(small_net())


def test_clusters_divide_the_clients_and_each_gives_its_share_of_the_round():
    sim = simulate(FedCluster, FED, LAYOUT, k=5, rounds=8, options={"clusters": 3})
    clusters = [set(cluster.tolist()) for cluster in sim.method.clusters]
    assert sorted(len(c) for c in clusters) == [3, 4, 4]
    assert set().union(*clusters) == set(range(11))
    orders = set()
    for round in range(8):
        order = []
        for _ in range(3):
            jobs = sim.plan()
            clients = {hop.client for _, hop in jobs}
            (which,) = [i for i, cluster in enumerate(clusters) if clients <= cluster]
            assert len(clients) == len(jobs) == (2, 2, 1)[which]
            order.append(which)
            sim.absorb(sim.engine.train(jobs))
        assert sim.method.round == round + 1
        orders.add(tuple(order))
        sim.record({})
    assert len(orders) > 1
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert all(len(record.clients) == 5 for record in sim.history)


def test_others_take_the_place_of_clients_that_are_banned():
    sim = simulate(FedCluster, FED, LAYOUT, k=5, rounds=4, options={"clusters": 3})
    banned = sim.method.clusters[1].tolist() + sim.method.clusters[0].tolist()[1:]  # five clients are left
    banned = banned[:6]
    sim.method.bans.banned = banned
    for _ in range(4 * 3):
        jobs = sim.plan()
        assert jobs
        assert not {hop.client for _, hop in jobs} & set(banned)
        sim.absorb(sim.engine.train(jobs))
        if sim.method.stage == 0:
            sim.record({})
    assert [len(record.hops) for record in sim.history] == [5] * 4


def test_a_cluster_starts_from_the_model_that_the_last_one_left():
    sim = simulate(FedCluster, FED, LAYOUT, k=4, rounds=1, options={"clusters": 2})
    row = sim.method.row
    for _ in range(2):
        jobs = sim.plan()
        assert all(torch.equal(hop.start, row) for _, hop in jobs)
        replies = sim.engine.train(jobs)
        sim.absorb(replies)
        row = weighted_mean(torch.stack([r.end for r in replies]), [r.samples for r in replies])
        assert torch.equal(sim.method.row, row)
    assert sim.method.round == 1


def test_with_everybody_in_one_cluster_and_in_every_round_it_is_fedavg():
    one = simulate(FedCluster, FED, LAYOUT, k=11, rounds=3, options={"clusters": 1})
    plain = simulate(FedAvg, FED, LAYOUT, k=11, rounds=3)
    drive(one)
    drive(plain)
    assert torch.allclose(one.method.row, plain.method.row, atol=1e-14)


@pytest.mark.parametrize("clusters", [-1, 4])
def test_more_clusters_than_clients_in_a_round_are_refused(clusters):
    with pytest.raises(SettingError, match="clusters must be at least 0 and at most the 3 clients of a round"):
        simulate(FedCluster, FED, LAYOUT, k=3, options={"clusters": clusters})


@pytest.mark.parametrize(("k", "clusters"), [(3, 3), (9, 5)])
def test_by_default_there_are_five_clusters_or_as_many_as_clients_in_a_round(k, clusters):
    assert simulate(FedCluster, FED, LAYOUT, k=k).method.stages == clusters


@pytest.mark.parametrize("method", [FedCluster, Cyclic])
def test_hops_of_a_round_have_ids_and_slots_of_their_own(method):
    sim = simulate(method, FED, LAYOUT, k=7, rounds=2)
    found = {0: [], 1: []}
    while not sim.done:
        jobs = sim.plan()
        for _, hop in jobs:
            found[hop.round].append((hop.id, hop.copy))
        sim.absorb(sim.engine.train(jobs))
        sim.record({})
    assert all([copy for _, copy in hops] == list(range(7)) for hops in found.values())
    assert len({number for hops in found.values() for number, _ in hops}) == 14


def test_a_client_that_two_tours_meet_in_one_round_is_visited_twice():
    """Its second hop has chance of its own: another order of batches."""
    fed = federation([4, 9, 5, 12, 7])
    for seed in range(20):
        sim = simulate(Cyclic, fed, LAYOUT, k=4, rounds=2, seed=seed, options={"reshuffle": True})
        hops = []
        while not sim.done:
            jobs = sim.plan()
            hops += [hop for _, hop in jobs if hop.round == 1]
            sim.absorb(sim.engine.train(jobs))
            sim.record({})
        clients = [hop.client for hop in hops]
        assert [hop.visit for hop in hops] == [clients[:i].count(client) for i, client in enumerate(clients)]
        if len(set(clients)) < 4:
            return
    pytest.fail("no round met a client twice")


@pytest.mark.parametrize("reshuffle", [False, True])
def test_one_model_goes_round_all_clients(reshuffle):
    sim = simulate(Cyclic, FED, LAYOUT, k=4, rounds=11, options={"reshuffle": reshuffle})
    row, walked = sim.method.row, []
    while not sim.done:
        ((task, hop),) = sim.plan()
        assert torch.equal(hop.start, row)
        walked.append(hop.client)
        (reply,) = sim.engine.train([(task, hop)])
        sim.absorb([reply])
        row = reply.end
        assert torch.equal(sim.method.row, row)
        sim.record({})
    tours = [walked[i : i + 11] for i in range(0, 44, 11)]
    assert all(sorted(tour) == list(range(11)) for tour in tours)
    assert (tours[0] == tours[1]) != reshuffle
    assert all(len(record.clients) == 4 for record in sim.history)


def test_a_client_that_is_away_is_passed_over():
    sim = simulate(Cyclic, FED, LAYOUT, k=2, rounds=1)
    before = sim.method.row
    ((_, hop),) = sim.plan()
    sim.absorb([Reply.lost(hop, Status.FAILED, "away")])
    assert torch.equal(sim.method.row, before)
    ((_, following),) = sim.plan()
    assert following.client != hop.client


@pytest.mark.parametrize("method", [FedCluster, Cyclic])
def test_a_selector_beside_them_is_refused(method):
    with pytest.raises(SettingError, match="selector cannot be set"):
        simulate(method, FED, LAYOUT, k=5, selector=object())


def test_clusters_their_order_and_their_clients_come_from_their_own_streams():
    """Purpose 4 for the clusters and, as client 1, for the order of a round; 3 for who trains, by cluster."""
    sim = simulate(FedCluster, FED, LAYOUT, k=5, rounds=3, seed=6, options={"clusters": 3})
    clusters = np.array_split(philox(6, 4).permutation(11), 3)
    for r in range(3):
        for which in philox(6, 4, round=r, client=1).permutation(3):
            count = (2, 2, 1)[which]
            wanted = philox(6, 3, round=r, visit=which).choice(clusters[which], size=count, replace=False)
            jobs = sim.plan()
            assert [hop.client for _, hop in jobs] == wanted.tolist()
            sim.absorb(sim.engine.train(jobs))
        sim.record({})


@pytest.mark.parametrize("reshuffle", [False, True])
def test_a_tour_comes_from_its_own_stream(reshuffle):
    sim = simulate(Cyclic, FED, LAYOUT, k=4, rounds=7, seed=6, options={"reshuffle": reshuffle})
    tours = np.concatenate([philox(6, 4, round=tour if reshuffle else 0).permutation(11) for tour in range(3)])
    drive(sim)
    assert [client for record in sim.history for client in record.clients] == tours[:28].tolist()


@pytest.mark.parametrize("clusters", [1, 3])
def test_as_few_as_one_and_as_many_clusters_as_clients_in_a_round_are_taken(clusters):
    assert simulate(FedCluster, FED, LAYOUT, k=3, options={"clusters": clusters}).method.stages == clusters


def test_clusters_may_weight_clients_equally():
    sim = simulate(FedCluster, FED, LAYOUT, k=2, options={"clusters": 1, "weighting": "equal"})
    start = sim.method.row
    a, b = (hop for _, hop in sim.plan())
    sim.method.absorb([Reply(a.id, start + 1, samples=1, steps=1), Reply(b.id, start + 2, samples=9, steps=1)])
    assert torch.allclose(sim.method.row, start + 1.5, atol=1e-14)


@pytest.mark.parametrize("method", [FedCluster, Cyclic])
def test_a_state_between_stages_goes_on_at_the_next_one(method):
    sims = [simulate(method, FED, LAYOUT, k=4, rounds=3) for _ in range(2)]
    for _ in range(sims[0].method.stages + 1):
        step(sims[0])
    sims[1].method.restore(sims[0].method.state())
    for one in sims:
        assert (one.method.round, one.method.stage) == (1, 1)
    first, second = (sim.method.plan(3) for sim in sims)
    assert [(h.id, h.client, h.copy, h.visit) for h in first] == [(h.id, h.client, h.copy, h.visit) for h in second]
    assert all(torch.equal(h.start, g.start) for h, g in zip(first, second, strict=True))
