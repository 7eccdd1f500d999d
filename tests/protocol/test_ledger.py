from fedcat.protocol.ledger import Ledger


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
