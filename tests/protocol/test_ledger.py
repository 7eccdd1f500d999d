import torch
from helpers import federation, layout_of, simulate, small_net

from fedcat.methods import FedAvg
from fedcat.protocol.ledger import Ledger
from fedcat.protocol.local_rule import LocalRule


def test_bytes_by_round_client_and_direction():
    ledger = Ledger()
    ledger.sent(0, 7, 100)
    ledger.sent(0, 7, 50)
    ledger.received(0, 7, 30)
    ledger.sent(1, 7, 100)
    ledger.sent(0, 2, 10)
    assert [(e.round, e.client, e.down, e.up) for e in ledger] == [(0, 7, 150, 30), (1, 7, 100, 0), (0, 2, 10, 0)]
    assert (ledger.down, ledger.up, ledger.total) == (260, 30, 290)


def test_ended_rounds_are_handed_over_and_the_totals_stay():
    ledger = Ledger()
    ledger.sent(0, 7, 100)
    ledger.sent(1, 3, 20)
    assert [e.client for e in ledger.ended(1)] == [7]
    assert [e.client for e in ledger.ended(1)] == [7]
    ledger.forget(1)
    assert ledger.ended(1) == []
    assert [e.client for e in ledger] == [3]
    assert ledger.total == 120


def test_rounds_end_before_the_one_that_is_asked_for():
    ledger = Ledger()
    for round in range(4):
        ledger.received(round, 1, 10)
    assert [e.round for e in ledger.ended(2)] == [0, 1]
    ledger.forget(2)
    assert [e.round for e in ledger] == [2, 3]
    ledger.sent(2, 1, 5)
    assert [(e.round, e.down, e.up) for e in ledger] == [(2, 5, 10), (3, 0, 10)]
    assert (ledger.down, ledger.up, ledger.total) == (5, 40, 45)


class Chatty(LocalRule):
    def report(self, task, hop):
        return {"more": torch.zeros(100, dtype=torch.float32)}


def test_what_clients_send_besides_the_row_goes_up_and_not_down():
    class Own(FedAvg):
        rule = Chatty()

    layout = layout_of(small_net())
    sim = simulate(Own, federation([5] * 6), layout, rounds=2, k=3)
    sim.run()
    row = layout.size * 8
    assert [(e.down, e.up) for e in sim.ledger] == [(row, row + 400)] * 6
    assert (sim.ledger.down, sim.ledger.up) == (6 * row, 6 * (row + 400))
    assert [(record.down, record.up) for record in sim.history] == [
        (3 * row, 3 * (row + 400)),
        (6 * row, 6 * (row + 400)),
    ]
