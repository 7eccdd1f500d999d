"""The guard: hand-computed cosines, and who is refused for what."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedcat.protocol.guard import HopGuard, agreement_with_others
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply, Status

LAYOUT = SimpleNamespace(size=3, parameter_size=2, dtype=torch.float32)


def ended(changes, round=0, steps=4):
    pairs = []
    for client, change in enumerate(changes):
        hop = Hop(round=round, client=client, copy=client, start=torch.ones(3), epochs=1, lr=0.1)
        end = None if change is None else hop.start + torch.tensor([*change, 100.0])
        status = Status.FAILED if change is None else Status.ARRIVED
        pairs.append((hop, Reply(hop.id, end, samples=1, steps=steps, status=status)))
    return pairs


def test_the_cosine_with_the_sum_of_the_others():
    directions = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    products = directions @ directions.T
    rest = directions[1] + directions[2]
    clients = np.arange(3)
    assert agreement_with_others(products, 0, clients) == pytest.approx(rest[0] / np.linalg.norm(rest))
    assert agreement_with_others(products, 0, np.array([5, 5, 7])) == pytest.approx(0.6)  # not with its own second hop
    opposite = np.array([[1.0, 0, 0], [0, 1.0, -1.0], [0, -1.0, 1.0]])
    assert agreement_with_others(opposite, 0, clients) == 0.0


def test_who_points_against_the_others_is_refused_whatever_the_length_and_the_buffers():
    found = HopGuard(LAYOUT).judged(ended([(1.0, 0.1), (2.0, -0.2), (-3.0, 0.0), (1.5, 0.3)]))
    assert [reply.arrived for _, reply in found] == [True, True, False, True]
    assert found[2][1].why == "the client's updates point against the others'"


def test_cosines_add_up_over_rounds_and_a_client_can_come_back():
    guard = HopGuard(LAYOUT)
    guard.judged(ended([(1.0, 0.0), (1.0, 0.0), (1.0, 0.0)]))
    assert guard.agreement == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0})
    found = guard.judged(ended([(1.0, 0.0), (1.0, 0.0), (-0.6, 0.8)], 1))
    assert guard.agreement[2] == pytest.approx(0.4)
    assert all(reply.arrived for _, reply in found)
    found = guard.judged(ended([(1.0, 0.0), (1.0, 0.0), (-1.0, 0.0)], 2))
    assert not found[2][1].arrived
    found = guard.judged(ended([(1.0, 0.0), (1.0, 0.0), (1.0, 0.0)], 3))
    assert found[2][1].arrived


def test_an_update_that_is_far_too_long_is_refused():
    found = HopGuard(LAYOUT).judged(ended([(1.0, 0.1), (30.0, 0.0), (1.0, -0.1), (1.2, 0.0)]))
    assert [reply.arrived for _, reply in found] == [True, False, True, True]
    assert "10 times as long" in found[1][1].why


def test_two_hops_are_not_compared_and_lost_ones_pass():
    found = HopGuard(LAYOUT).judged(ended([(1.0, 0.0), (-1.0, 0.0), None]))
    assert [reply.status.value for _, reply in found] == ["arrived", "arrived", "failed"]
    assert HopGuard(LAYOUT).judged(ended([None])) != []


def test_the_order_in_which_hops_ended_changes_nothing():
    pairs = ended([(1.0, 0.1), (2.0, -0.2), (-3.0, 0.0), (1.5, 0.3)])
    one, other = HopGuard(LAYOUT), HopGuard(LAYOUT)
    a, b = one.judged(pairs), other.judged(pairs[::-1])
    assert [(hop.id, reply.status) for hop, reply in a] == [(hop.id, reply.status) for hop, reply in b]
    assert one.agreement == other.agreement
    fresh = HopGuard(LAYOUT)
    fresh.restore(one.state())
    assert fresh.agreement == one.agreement
