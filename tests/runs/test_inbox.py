"""Runs whose clients fail: what methods make of it, who is banned, and what the clock shows."""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import QUICK, drive, federation, layout_of, one_by_one, simulate, small_net

import fedcat
from fedcat.core.errors import SettingError
from fedcat.methods import METHODS, FedAvg, FedCat
from fedcat.methods.scaffold import Scaffold
from fedcat.protocol.guard import HopGuard

SHORT = {"dataset": "digits", "clients": 20, "per_round": 4, "rounds": 8, "epochs": 1, "evaluate_every": 4}
NAMES = [name for name, _ in METHODS]
FED = federation([3, 9, 5, 12, 7, 4, 8, 6, 5])
LAYOUT = layout_of(small_net())


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("faults", [{"dropout": 0.5}, {"corrupt": 0.5, "corrupt_kinds": ["nan", "inf", "shape"]}])
def test_every_method_gets_through(method, faults):
    result = fedcat.run(method=method, method_options=QUICK.get(method, {}), **SHORT, **faults)
    assert result.status == "finished"
    hops = [hop for record in result.history for hop in record.hops]
    lost = [hop for hop in hops if not hop.arrived]
    assert 0.2 * len(hops) < len(lost) < 0.8 * len(hops)
    assert all(parameter.isfinite().all() for parameter in result.model().parameters())
    if "dropout" in faults:
        assert {(hop.status, hop.why, hop.up) for hop in lost} == {("failed", "the client dropped out", 0)}
        assert all(hop.down > 0 for hop in lost)


@pytest.mark.parametrize("method", ["fedavg", "fedcat", "scaffold", "fedgen", "clusamp"])
def test_a_round_in_which_nothing_arrives_leaves_the_model(method):
    result = fedcat.run(method=method, dropout=1.0, **SHORT)
    assert result.status == "untrained"
    assert len(result.history) == 8
    first = fedcat.run(method=method, **{**SHORT, "rounds": 4}, dropout=1.0)
    assert torch.equal(result.model().head.weight, first.model().head.weight)


def test_faults_are_the_same_for_all_methods_of_a_comparison():
    found = fedcat.compare(["fedavg", "fedprox", "scaffold"], 1, dropout=0.4, corrupt=0.2, **SHORT)
    fates = [
        [[(hop.client, hop.status) for hop in record.hops] for record in line.results[0].history] for line in found
    ]
    assert fates[0] == fates[1] == fates[2]


def test_repeated_replies_change_nothing():
    plain, repeated = (
        fedcat.run(method="fedcat", **SHORT, **faults)
        for faults in ({}, {"corrupt": 1.0, "corrupt_kinds": ["repeated"]})
    )
    assert torch.equal(plain.model().head.weight, repeated.model().head.weight)
    assert plain.summary.bytes == repeated.summary.bytes


def test_scaffold_leaves_the_variates_of_a_lost_reply(monkeypatch):
    run = simulate(Scaffold, FED, LAYOUT, rounds=6, k=4)
    dropped = monkeypatch.setattr(type(run.inbox.faults), "drops", lambda self, hop: hop.client % 2 == 0)
    assert dropped is None
    drive(run)
    kept = set(run.method.memory._kept)
    assert kept
    assert all(client % 2 for client in kept)
    seen = {hop.client for record in run.history for hop in record.hops}
    assert {client for client in seen if client % 2 == 0}


# The clock


def test_a_round_takes_as_long_as_its_slowest_hop():
    result = fedcat.run(method="fedavg", step_seconds=0.5, bandwidth=1e6, straggler="0.3,10", **SHORT)
    times = [0.0, *(record.simulated_seconds for record in result.history)]
    steps = {client: -(-int(size) // 10) for client, size in enumerate(result.federation.sizes)}
    from fedcat.protocol.faults import Faults

    slow = Faults(0, 20, 1, slow=0.3, factor=10.0).slow_clients
    for record, (before, after) in zip(result.history, pairwise(times), strict=True):
        longest = max(0.5 * steps[client] * (10 if client in slow else 1) for client in record.clients)
        assert after - before == pytest.approx(longest, rel=1e-3)


def test_a_deadline_makes_rounds_shorter_and_loses_the_slow():
    words = {**SHORT, "method": "fedavg", "straggler": "0.3,50", "step_seconds": 0.1, "bandwidth": 1e6}
    patient, strict = (fedcat.run(deadline=deadline, **words) for deadline in (None, 5.0))
    assert strict.history[-1].simulated_seconds < patient.history[-1].simulated_seconds
    assert all(b.simulated_seconds - a.simulated_seconds <= 5.0 + 1e-9 for a, b in pairwise(strict.history))
    lost = [hop for record in strict.history for hop in record.lost]
    assert {hop.status for hop in lost} == {"late"}
    assert all(hop.up == hop.down for hop in lost)  # the bytes come, too late
    assert not any(record.lost for record in patient.history)


def test_stages_take_their_time_one_after_another():
    quick, chain = (
        fedcat.run(method=method, step_seconds=1.0, bandwidth=1e9, **SHORT).history[-1].simulated_seconds
        for method in ("fedavg", "cyclic")
    )
    assert chain > 2 * quick


# Bans


@pytest.mark.parametrize("method", NAMES)
def test_a_banned_client_is_not_selected_again(method, monkeypatch):
    bad = {0, 3, 7}

    def delivered(self, hop, reply):
        from dataclasses import replace

        return [replace(reply, end=reply.end[:-1])] if hop.client in bad and reply.end is not None else [reply]

    monkeypatch.setattr("fedcat.protocol.faults.Faults.delivered", delivered)
    options = QUICK.get(method, {})
    result = fedcat.run(method=method, method_options=options, ban_after=2, **{**SHORT, "rounds": 20})
    refused = [
        (record.round, hop.client) for record in result.history for hop in record.hops if hop.status == "refused"
    ]
    counts = {client: sum(other == client for _, other in refused) for client in bad}
    cycle = 4 if method.startswith("fedcat") else 1
    for client, count in counts.items():
        rounds = [round for round, other in refused if other == client]
        if count >= 2:
            banned = rounds[1]
            first = (banned - 1) // cycle * cycle + cycle  # the next selection that waited for these replies
            assert all(round <= first for round in rounds)
    assert any(count >= 2 for count in counts.values())
    assert any("banned for refused replies" in note for note in result.summary.notes)


def test_enough_clients_are_left_for_a_round():
    result = fedcat.run(method="fedavg", corrupt=1.0, corrupt_kinds=["nan"], ban_after=1, **{**SHORT, "rounds": 30})
    (note,) = [note for note in result.summary.notes if note.startswith("banned")]
    assert note.startswith("banned for refused replies: 16 clients, ")
    assert all(len(record.hops) == 4 for record in result.history)


@pytest.mark.parametrize("method", [FedAvg, FedCat])
@pytest.mark.parametrize("options", [{}, {"retry": 2}])
def test_the_order_of_replies_changes_no_ban_and_no_retry(method, options, monkeypatch):
    if method is FedAvg and options:
        return
    monkeypatch.setattr("fedcat.protocol.faults.Faults.drops", lambda self, hop: (hop.client + hop.round) % 4 == 0)

    def made():
        run = simulate(method, FED, LAYOUT, rounds=12, k=3, exact=True, run_name="a", options=options)
        run.method.bans.after = 2
        run.inbox.check.bound = 0.45
        return run

    whole = drive(made())
    assert whole.method.bans.banned
    assert whole.method.bans.refused
    for seed in range(4):
        other = one_by_one(made(), seed)
        assert torch.equal(other.method.row, whole.method.row)
        assert [sorted((h.client, h.attempt, h.status) for h in r.hops) for r in other.history] == [
            sorted((h.client, h.attempt, h.status) for h in r.hops) for r in whole.history
        ]


def test_a_selector_sees_only_who_is_left():
    seen = []

    def watched(round, rng, samples, k):
        seen.append(len(samples))
        return rng.choice(len(samples), k, replace=False)

    result = fedcat.run(
        method="fedavg", selector=watched, corrupt=1.0, corrupt_kinds=["nan"], ban_after=1, **{**SHORT, "rounds": 3}
    )
    assert seen == [20, 16, 12]
    clients = [client for record in result.history for client in record.clients]
    assert len(set(clients)) == 12


# FedCat tries again


@pytest.mark.parametrize("options", [{}, {"grouping": False}])
def test_a_copy_tries_other_clients_of_its_group(options):
    words = {**SHORT, "dropout": 0.4, "rounds": 12}
    plain, again = (
        fedcat.run(method="fedcat", method_options={**options, "retry": retry}, **words) for retry in (0, 3)
    )
    for record in again.history:
        by_copy = {}
        for hop in record.hops:
            by_copy.setdefault(hop.copy, []).append(hop)
        for hops in by_copy.values():
            assert [hop.attempt for hop in hops] == list(range(len(hops)))
            assert [hop.arrived for hop in hops[:-1]] == [False] * (len(hops) - 1)
            assert hops[-1].arrived or len(hops) == 4
        assert len(set(record.clients)) == len(record.clients)
    arrived = [sum(hop.arrived for record in run.history for hop in record.hops) for run in (plain, again)]
    assert arrived[0] < arrived[1]
    assert arrived[1] >= 0.9 * 4 * 12


def test_a_substitute_is_of_the_same_group_and_counts_as_selected():
    run = simulate(FedCat, FED, LAYOUT, rounds=3, k=3, options={"retry": 2})
    run.inbox.faults = type(run.inbox.faults)(**{**vars(run.inbox.faults), "dropout": 0.5})
    drive(run)
    table = run.method.selector.table.dense(3)
    hops = [hop for record in run.history for hop in record.hops]
    assert any(hop.attempt for hop in hops)
    assert table.sum() == len(hops)
    counted = np.zeros_like(table)
    for hop in hops:
        counted[hop.client, hop.round % 3] += 1
    assert np.array_equal(table, counted)
    groups = run.method.selector.groups(0)
    for record in run.history:
        for hop in record.hops:
            first = next(h for h in record.hops if h.copy == hop.copy and h.attempt == 0)
            assert any({hop.client, first.client} <= set(group.tolist()) for group in groups)


def test_retry_must_not_be_negative():
    with pytest.raises(SettingError, match="retry must be at least 0, got -1"):
        fedcat.run(method="fedcat", method_options={"retry": -1}, **SHORT)


# The guard


def test_the_guard_refuses_liars_and_lets_most_others_pass():
    words = {"dataset": "digits", "alpha": 0.5, "rounds": 40, "lr": 0.03, "flip": 0.2}
    result = fedcat.run(method="fedcat", guard=True, **words)
    from fedcat.protocol.faults import Faults

    liars = Faults(0, 50, 1, flip=0.2).liars
    hops = [hop for record in result.history for hop in record.hops]
    refused = {kind: np.mean([h.status == "refused" for h in hops if (h.client in liars) == kind]) for kind in (0, 1)}
    assert refused[1] > 0.6
    assert refused[0] < 0.35
    assert {hop.why for hop in hops if not hop.arrived} == {"the client's updates point against the others'"}


@pytest.mark.parametrize("method", [FedAvg, FedCat])
def test_a_guarded_run_does_not_depend_on_the_order_of_replies(method):
    def made():
        run = simulate(method, FED, LAYOUT, rounds=9, k=4, exact=True, run_name="a")
        run.inbox.guard = HopGuard(LAYOUT)
        return run

    whole = drive(made())
    assert any(record.lost for record in whole.history)
    for seed in range(3):
        other = one_by_one(made(), seed)
        assert torch.equal(other.method.row, whole.method.row)
        assert other.inbox.guard.agreement == whole.inbox.guard.agreement


def test_a_guarded_run_is_resumed_with_the_same_bits(tmp_path):
    words = {**SHORT, "method": "fedcat", "guard": True, "flip": 0.3, "ban_after": 2, "method_options": {"retry": 1}}
    whole = fedcat.run(out=tmp_path / "whole", **words)
    fedcat.run(out=tmp_path / "short", **{**words, "rounds": 3})
    again = fedcat.resume(tmp_path / "short", rounds=8)
    assert torch.equal(whole.model().head.weight, again.model().head.weight)
    assert [r.hops for r in whole.history] == [r.hops for r in again.history]
    assert [r.simulated_seconds for r in whole.history] == [r.simulated_seconds for r in again.history]
