import numpy as np
import pytest
import torch
from helpers import apart, drive, federation, layout_of, philox, simulate, small_net
from torch import nn

from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg
from fedcat.methods.average import weighted_mean
from fedcat.protocol.hop import HopId
from fedcat.protocol.reply import Reply, Status


@pytest.fixture
def layout():
    return layout_of(small_net())


def test_the_mean_is_weighted_by_samples():
    rows = torch.tensor([[0.0, 2.0], [4.0, 6.0]], dtype=torch.float64)
    assert weighted_mean(rows, [1, 3]).tolist() == [3.0, 5.0]


def test_equal_rows_have_exactly_themselves_as_mean():
    row = torch.randn(1000)
    assert torch.equal(weighted_mean(row.expand(7, -1), [3, 1, 4, 1, 5, 9, 2]), row)


def test_rows_of_no_weight_change_no_bit():
    rows = torch.randn(4, 100)
    assert torch.equal(weighted_mean(rows, [0, 2, 0, 3]), weighted_mean(rows[[1, 3]], [2, 3]))


def test_one_round_is_the_average_of_plain_sgd_on_each_client(layout):
    fed = federation([6, 9, 4])
    sim = simulate(FedAvg, fed, layout, rounds=1, k=3, batch_size=100, epochs=3, lr=0.2, momentum=0.0)
    start = sim.method.row
    drive(sim)
    ends = []
    for client in range(3):
        net = small_net().double()
        layout.write(start, net)
        x = fed.train.x[fed.indices(client)].double()
        y = fed.train.y[fed.indices(client)]
        for _ in range(3):
            net.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.2 * p.grad
        ends.append(layout.pack(net))
    expected = (6 * ends[0] + 9 * ends[1] + 4 * ends[2]) / 19
    assert apart(sim.method.row, expected) < 1e-14


def test_one_client_is_plain_training(layout):
    fed = federation([8])
    sim = simulate(FedAvg, fed, layout, rounds=3, k=1, batch_size=8, epochs=1, momentum=0.0)
    row = sim.method.row
    drive(sim)
    net = small_net().double()
    layout.write(row, net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        sgd.zero_grad()
        nn.functional.cross_entropy(net(fed.train.x.double()), fed.train.y).backward()
        sgd.step()
    assert apart(sim.method.row, layout.pack(net)) < 1e-14


def lose(sim, which, status=Status.FAILED):
    """Run one round in which the hops of the slots `which` are lost."""
    jobs = sim.plan()
    replies = sim.engine.train(jobs)
    lost = [
        Reply.lost(hop, status, "switched off") if hop.copy in which else reply
        for (_, hop), reply in zip(jobs, replies, strict=True)
    ]
    sim.absorb(lost)
    sim.record({})
    return replies


def test_a_lost_client_is_left_out(layout):
    sim = simulate(FedAvg, federation([5] * 6), layout, k=3)
    replies = lose(sim, {1})
    ends = torch.stack([replies[0].end, replies[2].end])
    assert torch.equal(sim.method.row, weighted_mean(ends, [replies[0].samples, replies[2].samples]))
    (lost,) = sim.history[0].lost
    assert (lost.client, lost.copy, lost.status, lost.why) == (sim.history[0].clients[1], 1, "failed", "switched off")


def test_when_all_are_lost_the_model_stays_and_the_round_counts(layout):
    sim = simulate(FedAvg, federation([5] * 6), layout, k=3)
    before = sim.method.row
    lose(sim, {0, 1, 2}, Status.LATE)
    assert torch.equal(sim.method.row, before)
    assert sim.method.round == 1
    assert sim.history[0].train_loss is None
    drive(sim)
    assert len(sim.history) == 4


def test_a_reply_that_nobody_waits_for_is_an_error(layout):
    sim = simulate(FedAvg, federation([5] * 6), layout)
    with pytest.raises(ValueError, match=r"round=99, copy=0, attempt=0\) is not outstanding"):
        sim.method.absorb([Reply(HopId(99, 0))])


def test_planning_past_the_last_round_gives_nothing(layout):
    sim = simulate(FedAvg, federation([5] * 6), layout)
    assert sim.method.plan(0) == []
    assert len(sim.method.plan(1)) == 3
    assert sim.method.plan(1) == []


def answered(sim, numbers=(1.0, 2.0, 4.0), samples=(1, 2, 5)):
    """Take a round whose clients add numbers to the row and hold so many samples; return the hops."""
    hops = sim.method.plan(9)
    sim.method.absorb(
        [Reply(h.id, h.start + n, samples=s, steps=1) for h, n, s in zip(hops, numbers, samples, strict=True)]
    )
    return hops


@pytest.mark.parametrize(("options", "moved"), [({}, 25 / 8), ({"weighting": "equal"}, 7 / 3)])
def test_clients_are_weighted_by_samples_or_equally(layout, options, moved):
    sim = simulate(FedAvg, federation([5] * 6), layout, k=3, options=options)
    start = sim.method.row
    answered(sim)
    assert torch.allclose(sim.method.row, start + moved, atol=1e-14)


def test_an_unknown_weighting_is_refused(layout):
    with pytest.raises(SettingError, match="unknown weighting 'sample': did you mean 'samples'"):
        simulate(FedAvg, federation([5] * 6), layout, options={"weighting": "sample"})


def test_the_clients_of_a_round_are_drawn_from_its_own_stream(layout):
    sim = simulate(FedAvg, federation([5] * 9), layout, k=3, rounds=6, seed=8, epochs=4)
    for r in range(6):
        hops = answered(sim)
        assert [hop.client for hop in hops] == philox(8, 3, round=r).choice(9, size=3, replace=False).tolist()
        assert [(hop.id, hop.visit) for hop in hops] == [((r, i, 0), 0) for i in range(3)]
        assert {hop.epochs for hop in hops} == {4}
        assert sim.method.round == r + 1


def test_a_round_waits_for_its_last_client(layout):
    sim = simulate(FedAvg, federation([5] * 6), layout, k=3)
    start = sim.method.row
    a, b, c = sim.method.plan(9)
    for hop in (c, a):
        sim.method.absorb([Reply(hop.id, hop.start + 1.0, samples=1, steps=1)])
        assert (sim.method.round, sim.method.plan(9)) == (0, [])
        assert torch.equal(sim.method.row, start)
    sim.method.absorb([Reply(b.id, b.start + 1.0, samples=1, steps=1)])
    assert sim.method.round == 1
    assert [hop.round for hop in sim.method.plan(9)] == [1] * 3


def test_a_state_in_mid_round_holds_the_replies_as_they_were(layout):
    """Also if what carried them is overwritten afterwards, as an engine's memory is."""
    sims = [simulate(FedAvg, federation([5] * 6), layout, k=3) for _ in range(2)]
    hops = sims[0].method.plan(9)
    end = hops[1].start + 3.0
    early = Reply(hops[1].id, end, 4, 2, 0.5, {"u": torch.ones(2)}, {"m": torch.ones(2)})
    lost = Reply.lost(hops[2], Status.LATE, "60 s")
    sims[0].method.absorb([early, lost])
    state = sims[0].method.state()
    for tensor in (end, early.uploads["u"], early.memory["m"]):
        tensor.fill_(9.0)
    other = sims[1].method
    other.restore(state)
    assert [hop.id for hop in other.plan(9)] == [hops[0].id]
    kept = other._replies[hops[1].id]
    assert torch.equal(kept.end, hops[1].start + 3.0)
    assert (kept.samples, kept.steps, kept.loss, kept.bytes_up) == (4, 2, 0.5, early.bytes_up)
    assert (kept.uploads["u"].tolist(), kept.memory["m"].tolist()) == ([1.0, 1.0], [1.0, 1.0])
    assert (other._replies[hops[2].id].status, other._replies[hops[2].id].why) == (Status.LATE, "60 s")
    other.absorb([Reply(hops[0].id, hops[0].start, samples=8, steps=1)])
    assert torch.allclose(other.row, hops[0].start + 3.0 * 4 / 12)


class Turns:
    """Selects the next clients in turn: a selector with a state, which is asked for every round once."""

    def __init__(self, *given):
        self.next = 0

    def select(self, round):
        self.next += 3
        return np.arange(self.next - 3, self.next)

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]


def test_a_selector_with_a_state_is_asked_once_for_every_round_also_after_a_restore(layout):
    sims = [simulate(FedAvg, federation([5] * 9), layout, k=3, selector=Turns()) for _ in range(2)]
    assert [hop.client for hop in answered(sims[0])] == [0, 1, 2]
    hops = sims[0].method.plan(9)
    sims[1].method.restore(sims[0].method.state())
    assert [hop.client for hop in sims[1].method.plan(9)] == [hop.client for hop in hops] == [3, 4, 5]
    for sim in sims:
        sim.method.absorb([Reply(hop.id, hop.start + 1, samples=1, steps=1) for hop in hops])
        assert [hop.client for hop in sim.method.plan(9)] == [6, 7, 8]


@pytest.mark.parametrize("wrong", [None, torch.zeros(3, dtype=torch.float64), "float32"])
def test_a_mean_that_is_no_row_is_refused(layout, wrong):
    class Own(FedAvg):
        def reduce(self, hops, replies):
            return super().reduce(hops, replies).float() if wrong == "float32" else wrong

    sim = simulate(Own, federation([5] * 6), layout, k=3)
    with pytest.raises(SettingError, match=r"method Own must return a row of torch.float64 of shape .* from reduce"):
        answered(sim)
