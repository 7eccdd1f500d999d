import pytest
import torch
from helpers import apart, federation, layout_of, simulate, small_net
from torch import nn

from fedcat.methods import FedAvg
from fedcat.methods.average import weighted_mean
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
    sim.run()
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
    sim.run()
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
    sim.record()
    return replies


def test_a_lost_client_is_left_out(layout):
    sim = simulate(FedAvg, federation([5] * 6), layout, k=3)
    replies = lose(sim, {1})
    ends = torch.stack([replies[0].end, replies[2].end])
    assert torch.equal(sim.method.row, weighted_mean(ends, [replies[0].samples, replies[2].samples]))
    assert sim.history[0].lost == [[sim.history[0].clients[1], "failed", "switched off"]]


def test_when_all_are_lost_the_model_stays_and_the_round_counts(layout):
    sim = simulate(FedAvg, federation([5] * 6), layout, k=3)
    before = sim.method.row
    lose(sim, {0, 1, 2}, Status.LATE)
    assert torch.equal(sim.method.row, before)
    assert sim.method.round == 1
    assert sim.history[0].train_loss is None
    sim.run()
    assert len(sim.history) == 4


def test_a_reply_that_nobody_waits_for_is_an_error(layout):
    sim = simulate(FedAvg, federation([5] * 6), layout)
    with pytest.raises(ValueError, match="hop 99 is not outstanding"):
        sim.method.absorb([Reply(99)])


def test_planning_past_the_last_round_gives_nothing(layout):
    sim = simulate(FedAvg, federation([5] * 6), layout)
    assert sim.method.plan(0) == []
    assert len(sim.method.plan(1)) == 3
    assert sim.method.plan(1) == []
