"""Faults of simulated clients: reproducible, as frequent as asked for, and the same for every method."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcat.protocol.faults import KINDS, Faults
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply, Status

SIZE = 6


def faults(**given):
    return Faults(seed=3, clients=50, parameter_size=4, kinds=given.pop("kinds", KINDS), **given)


def hop(round=0, client=0, visit=0, start=None):
    start = torch.arange(SIZE, dtype=torch.float32) if start is None else start
    return Hop(round=round, client=client, start=start, epochs=1, lr=0.1, visit=visit)


def reply(hop, change=1.0, **more):
    return Reply(hop.id, hop.start + change, samples=5, steps=4, loss=0.5, finite=True, **more)


def test_without_faults_a_reply_arrives_as_it_is():
    sent = hop()
    back = reply(sent)
    assert faults().delivered(sent, back) == [back]
    assert not faults().drops(sent)


def test_dropout_is_as_frequent_as_asked_for_and_depends_on_the_key_alone():
    made = faults(dropout=0.3)
    hops = [hop(round, client) for round in range(100) for client in range(20)]
    dropped = [made.drops(one) for one in hops]
    assert 0.27 < np.mean(dropped) < 0.33
    assert dropped == [faults(dropout=0.3).drops(one) for one in reversed(hops)][::-1]
    assert dropped != [replace(made, seed=4).drops(one) for one in hops]
    more = replace(made, dropout=0.6)
    assert all(more.drops(one) for one, less in zip(hops, dropped, strict=True) if less)
    assert all(faults(dropout=1.0).drops(one) for one in hops)


def test_a_fixed_share_of_the_clients_lies():
    made = faults(flip=0.2)
    assert len(made.liars) == 10
    assert made.liars < faults(flip=0.4).liars
    liar = min(made.liars)
    uploads = {"control": torch.tensor([1.0, -2.0]), "labels": torch.tensor([3, 4])}
    sent = hop(client=liar)
    (turned,) = made.delivered(sent, reply(sent, 0.5, uploads=uploads))
    assert torch.equal(turned.end, sent.start + torch.tensor([-0.5] * 4 + [0.5] * 2))  # buffers are as they were
    assert torch.equal(turned.uploads["control"], torch.tensor([-1.0, 2.0]))
    assert torch.equal(turned.uploads["labels"], torch.tensor([3, 4]))
    sent = hop(client=next(client for client in range(50) if client not in made.liars))
    assert torch.equal(made.delivered(sent, reply(sent))[0].end, sent.start + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_corruption(kind):
    made, sent = faults(corrupt=1.0, kinds=(kind,)), hop()
    found = made.delivered(sent, reply(sent))
    ends = [one.end for one in found]
    if kind == "repeated":
        assert [one.hop for one in found] == [sent.id, sent.id]
        assert all(torch.equal(end, sent.start + 1) for end in ends)
        return
    (end,) = ends
    assert found[0].finite is None  # to be looked at again
    if kind == "shape":
        assert end.shape == (SIZE - 1,)
    elif kind == "huge":
        assert torch.allclose(end, sent.start + 1e6)
    else:
        assert (torch.isnan(end) if kind == "nan" else torch.isinf(end)).sum() == 1


def test_corruption_is_as_frequent_as_asked_for():
    made = faults(corrupt=0.2)
    found = []
    for round in range(40):
        for client in range(20):
            sent = hop(round, client)
            back = reply(sent)
            found.append(made.delivered(sent, back) != [back])
    assert 0.15 < np.mean(found) < 0.25


def test_the_clock_counts_steps_and_bytes():
    made, sent = faults(step_seconds=0.1, bandwidth=48.0), hop(client=1)
    assert made.seconds(sent, reply(sent)) == pytest.approx(4 * 0.1 + 2 * 24 / 48)
    slow = replace(made, slow=0.5, factor=3.0)
    assert len(slow.slow_clients) == 25
    other = next(iter(slow.slow_clients))
    assert slow.seconds(hop(client=other), reply(sent)) == pytest.approx(3 * 1.4)


def test_a_reply_after_the_deadline_is_late_and_its_bytes_count():
    made, sent = faults(step_seconds=1.0, bandwidth=1e9, deadline=3.0), hop()
    (late,) = made.delivered(sent, reply(sent))
    assert (late.status, late.end, late.bytes_up) == (Status.LATE, None, 24)
    assert "not back within 3 s" in late.why
    assert made.seconds(sent, reply(sent)) == 3.0
    assert made.seconds(sent, Reply.lost(sent, Status.FAILED, "gone")) == 3.0
    assert faults().seconds(sent, Reply.lost(sent, Status.FAILED, "gone")) == 0.0
    assert replace(made, deadline=5.0).delivered(sent, reply(sent))[0].arrived
