import json

import torch
from helpers import drive, federation, layout_of, simulate, small_net

from fedcat.methods import FedAvg
from fedcat.protocol.hop import Hop
from fedcat.protocol.ledger import Ledger
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.reply import Reply, Status


def hop(round, copy=0, client=7, size=25, attempt=0):
    return Hop(round, client, torch.zeros(size), 1, 0.1, copy=copy, attempt=attempt)


def test_each_hop_and_attempt_is_counted_once():
    ledger = Ledger()
    for one in (hop(0), hop(0), hop(0, attempt=1), hop(1), hop(0, copy=1, client=2, size=5)):
        ledger.sent(one)
    ledger.received(hop(0), Reply(hop(0).id, torch.ones(25), 3, 2, loss=0.5))
    ledger.received(hop(0, attempt=1), Reply.lost(hop(0, attempt=1), Status.FAILED, "battery"))
    found = [(e.round, e.copy, e.attempt, e.client, e.down, e.up, e.status, e.why, e.loss) for e in ledger]
    assert found == [
        (0, 0, 0, 7, 100, 100, "arrived", "", 0.5),
        (0, 0, 1, 7, 100, 0, "failed", "battery", None),
        (1, 0, 0, 7, 100, 0, "", "", None),
        (0, 1, 0, 2, 20, 0, "", "", None),
    ]
    assert (ledger.down, ledger.up, ledger.total) == (320, 100, 420)
    assert [(e.copy, e.attempt) for e in ledger.of_round(0)] == [(0, 0), (0, 1), (1, 0)]


def test_bytes_of_a_round_do_not_depend_on_hops_that_run_ahead():
    ledger = Ledger()
    for round in range(3):
        ledger.sent(hop(round))
        ledger.received(hop(round), Reply(hop(round).id, torch.ones(25), 1, 1))
    assert [ledger.until(round) for round in range(4)] == [(0, 0), (100, 100), (200, 200), (300, 300)]
    ledger.forget(2)
    assert [e.round for e in ledger] == [2]
    assert [ledger.until(round) for round in (2, 3)] == [(200, 200), (300, 300)]
    ledger.add_up(hop(0), 7)
    assert ledger.until(2) == (200, 207)
    ledger.add_up(hop(2), 5)
    assert (ledger.until(2), ledger.until(3)) == ((200, 207), (300, 312))


def test_a_restored_ledger_counts_a_hop_that_is_planned_again_no_second_time():
    ledger = Ledger()
    ledger.sent(hop(0))
    ledger.sent(hop(0, copy=1))
    ledger.received(hop(0), Reply(hop(0).id, torch.ones(25), 1, 1))
    ledger.evaluation = 11
    other = Ledger()
    other.restore(json.loads(json.dumps(ledger.state())))
    other.sent(hop(0, copy=1))
    assert (other.down, other.up, other.evaluation) == (200, 100, 11)
    assert list(other) == list(ledger)


class Chatty(LocalRule):
    def report(self, task, hop):
        return {"more": torch.zeros(100, dtype=torch.float32)}


def test_what_clients_send_besides_the_row_goes_up_and_not_down():
    class Own(FedAvg):
        rule = Chatty()

    layout = layout_of(small_net())
    sim = simulate(Own, federation([5] * 6), layout, rounds=2, k=3)
    drive(sim)
    row = layout.size * 8
    assert [(e.down, e.up) for record in sim.history for e in record.hops] == [(row, row + 400)] * 6
    assert (sim.ledger.down, sim.ledger.up) == (6 * row, 6 * (row + 400))
    assert [(record.down, record.up) for record in sim.history] == [
        (3 * row, 3 * (row + 400)),
        (6 * row, 6 * (row + 400)),
    ]
