"""Aggregation as a part: every averaging method takes one, and its state is part of the run's."""

import json

import pytest
import torch
from helpers import drive, federation, layout_of, simulate, small_net, step

import fedcat
from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg, FedCat
from fedcat.methods.aggregation import AGGREGATORS, Aggregator, make_aggregator
from fedcat.methods.average import weighted_mean
from fedcat.runs.state import decode, encode

FED = federation([3, 9, 5, 12, 7, 4, 8, 6, 5])
SHORT = {"dataset": "digits", "rounds": 4, "epochs": 1}


def median(rows, weights, start):
    return rows.median(dim=0).values


def halfway(rows, weights, start):
    return (start + weighted_mean(rows, weights)) / 2


def test_the_mean_is_the_default_bit_for_bit():
    layout = layout_of(small_net())
    for method in (FedAvg, FedCat):
        default = drive(simulate(method, FED, layout))
        named = drive(simulate(method, FED, layout, aggregator=make_aggregator("mean", AGGREGATORS.get("mean"), {})))
        assert torch.equal(default.method.row, named.method.row)


@pytest.mark.parametrize("method", [FedAvg, FedCat])
def test_an_aggregator_gets_the_rows_their_weights_and_what_they_started_from(method):
    seen = []

    def noted(rows, weights, start):
        seen.append((rows.clone(), list(weights), start.clone()))
        return weighted_mean(rows, weights)

    layout = layout_of(small_net())
    run = simulate(method, FED, layout, rounds=3, k=3, aggregator=make_aggregator("noted", noted, {}))
    start = run.method.row
    drive(run)
    assert len(seen) == (3 if method is FedAvg else 1)
    rows, weights, given = seen[0]
    assert rows.shape == (3, layout.size)
    assert torch.equal(given, start)
    clients = [record.clients for record in run.history]
    if method is FedAvg:
        assert weights == [FED.sizes[client] for client in clients[0]]
        assert torch.equal(seen[1][2], weighted_mean(rows, weights))
    else:
        assert weights == [sum(int(FED.sizes[c[copy]]) for c in clients) for copy in range(3)]


@pytest.mark.parametrize("name", ["fedavg", "fedcat", "fedcluster", "fedgen", "scaffold", "fedadam"])
def test_methods_that_average_take_one(name):
    words = {**SHORT, "rounds": 2, "clients": 20}
    plain, other = (fedcat.run(method=name, aggregator=part, **words) for part in ("mean", halfway))
    assert plain.history[-1].loss != other.history[-1].loss
    assert other.settings.aggregator.endswith(":halfway")


def test_a_median_is_not_moved_by_one_liar():
    class Liar(FedAvg):
        def reduce(self, hops, replies):
            replies[0].end.fill_(1e6)
            return super().reduce(hops, replies)

    honest, robust = (fedcat.run(method=Liar, aggregator=part, **SHORT) for part in ("mean", median))
    assert max(p.abs().max() for p in honest.model().parameters()) > 1e4
    assert max(p.abs().max() for p in robust.model().parameters()) < 10


class Slow(Aggregator):
    """Moves a share of the way that doubles with every aggregation."""

    def __init__(self, share: float = 0.1):
        self.share = share

    def aggregate(self, rows, weights, start):
        self.share = min(1.0, 2 * self.share)
        return start + self.share * (weighted_mean(rows, weights) - start)

    def state(self):
        return {"share": self.share}

    def restore(self, state):
        self.share = state["share"]


def test_an_aggregator_with_state_is_restored():
    layout = layout_of(small_net())
    made = [simulate(FedAvg, FED, layout, run_name="a", aggregator=Slow(0.05)) for _ in range(3)]
    whole, broken, resumed = made
    drive(whole)
    step(broken)
    plain, tensors = encode(broken.state())
    resumed.restore(decode(json.loads(json.dumps(plain)), tensors))
    assert resumed.method.aggregator.share == 0.1
    assert torch.equal(drive(resumed).method.row, whole.method.row)


def test_options_are_set_and_swept_by_name():
    def trimmed(rows, weights, start, *, trim: int = 1):
        return rows.sort(dim=0).values[trim : len(rows) - trim].mean(dim=0)

    words = {**SHORT, "aggregator": trimmed, "exact": True}
    found = fedcat.compare(["fedavg"], 1, {"aggregator_trim": [1, 2]}, **words)
    assert [variant.label for variant in found] == ["fedavg aggregator_trim=1", "fedavg aggregator_trim=2"]
    losses = [variant.results[0].history[-1].loss for variant in found]
    single = fedcat.run(method="fedavg", aggregator_options={"trim": 2}, **words)
    assert losses[1] == single.history[-1].loss != losses[0]
    by_class = fedcat.run(method="fedcat", aggregator=Slow, aggregator_share=0.3, **SHORT)
    assert by_class.settings.aggregator_options == {"share": 0.3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "cyclic", "aggregator": median}, "aggregator cannot be set: cyclic averages nothing"),
        ({"aggregator": lambda rows, weights, start: rows}, "aggregator lambda must return a row of torch.float32"),
        ({"aggregator": lambda rows: rows[0]}, r"must be a function of \(rows, weights, start"),
        ({"aggregator": Aggregator}, "aggregator .* must define aggregate"),
        ({"aggregator": "middle"}, "unknown aggregator 'middle'"),
        ({"aggregator": dict}, "must be an Aggregator class, got dict"),
        ({"aggregator_options": {"trim": 1}}, "aggregator_trim needs an aggregator that takes it"),
    ],
)
def test_what_is_no_aggregator_is_refused(given, message):
    with pytest.raises(SettingError, match=message):
        fedcat.run(**{"method": "fedavg", **SHORT, **given})
