import io
import json
import math
import signal
import threading

import pytest
import torch
from helpers import drive, federation, layout_of, simulate, small_net, step
from rich.console import Console

from fedcat.core.interrupt import DeferredInterrupt
from fedcat.core.text import json_text
from fedcat.methods import FedAvg, FedCat
from fedcat.methods.base import Method
from fedcat.runs.evaluations import client_scores, score
from fedcat.runs.history import Record
from fedcat.runs.progress import ProgressDisplay

FED = federation([3, 9, 5, 12, 7, 4])
LAYOUT = layout_of(small_net())


def test_a_simulation_can_be_stepped():
    sim = simulate(FedCat, FED, LAYOUT, rounds=5, evaluate_every=2)
    rounds = []
    while not sim.done:
        rounds += [record.round for record in step(sim)]
    assert rounds == [1, 2, 3, 4, 5]
    assert [r.round for r in sim.history if r.accuracy is not None] == [2, 4, 5]
    whole = simulate(FedCat, FED, LAYOUT, rounds=5, evaluate_every=2)
    drive(whole)
    assert torch.equal(whole.method.row, sim.method.row)
    assert [r.accuracy for r in whole.history] == [r.accuracy for r in sim.history]


def test_side_by_side_is_as_one_by_one():
    words = [(FedAvg, 0), (FedCat, 0), (FedCat, 1)]
    alone = [simulate(m, FED, LAYOUT, seed=s, rounds=4) for m, s in words]
    for sim in alone:
        drive(sim)
    engine = alone[0].engine
    together = [simulate(m, FED, LAYOUT, engine, seed=s, rounds=4) for m, s in words]
    drive(*together)
    assert all(torch.equal(a.method.row, b.method.row) for a, b in zip(alone, together, strict=True))


def test_simulations_of_different_length_and_engine_end_each_in_their_time():
    sims = [
        simulate(FedAvg, FED, LAYOUT, "sequential", rounds=2),
        simulate(FedCat, FED, LAYOUT, "stacked", rounds=5),
    ]
    drive(*sims)
    assert [len(sim.history) for sim in sims] == [2, 5]


def test_the_history_says_who_trained_which_copy_and_what_it_cost():
    sim = simulate(FedCat, FED, LAYOUT, rounds=3, k=2)
    planned = []
    original = sim.method.plan

    def spy(until):
        hops = original(until)
        planned.extend((hop.round, hop.copy, hop.client) for hop in hops)
        return hops

    sim.method.plan = spy
    drive(sim)
    for record in sim.history:
        expected = [d for r, c, d in sorted(planned) if r == record.round - 1]
        assert record.clients == expected
        assert record.up == record.down == record.round * 2 * LAYOUT.size * 8
    assert sim.history[-1].seconds >= sim.history[0].seconds > 0


def test_further_models_are_evaluated_on_request():
    sim = simulate(FedCat, FED, LAYOUT, rounds=4, k=3, evaluate_every=1, evaluate=("mean", "copies"))
    drive(sim)
    assert set(sim.history[0].others) == {"mean", "copy 0", "copy 1", "copy 2"}
    assert sim.history[2].others["mean"] == sim.history[2].metrics
    assert sim.history[0].others["mean"] != sim.history[0].metrics
    plain = simulate(FedAvg, FED, LAYOUT, rounds=1, evaluate=("mean", "copies"))
    drive(plain)
    assert plain.history[0].others == {}


def test_a_record_is_plain_json():
    sim = simulate(FedCat, FED, LAYOUT, rounds=2)
    drive(sim)
    first, last = (json.loads(json.dumps(r.as_dict())) for r in sim.history)
    assert "metrics" not in first
    assert last["metrics"] == sim.history[1].metrics
    assert [hop["client"] for hop in first["hops"]] == sim.history[0].clients
    assert Record.from_dict(last) == sim.history[1]


def test_a_loss_that_is_not_finite_is_left_out_of_the_history():
    sim = simulate(FedAvg, FED, LAYOUT, rounds=2, evaluate_every=1)
    sim.method.row = torch.full_like(sim.method.row, math.inf)
    drive(sim)
    assert not all(math.isfinite(r.loss) for r in sim.history)
    for record in sim.history:
        assert json.loads(json_text(record.as_dict()))["metrics"]["loss"] is None or math.isfinite(record.loss)


def test_numbers_that_blow_up_are_refused_and_the_model_stays_finite():
    sim = simulate(FedAvg, FED, LAYOUT, rounds=3, lr=1e200, weight_decay=1e200)
    before = sim.method.row
    drive(sim)
    assert torch.equal(sim.method.row, before)
    assert all(len(record.lost) == 3 for record in sim.history)
    assert "not finite" in sim.history[0].lost[0].why
    assert sim.ledger.up == sim.ledger.down


def test_a_bound_keeps_large_changes_out():
    free = simulate(FedAvg, FED, LAYOUT, rounds=2)
    drive(free)
    bound = simulate(FedAvg, FED, LAYOUT, rounds=2, bound=1e-6)
    before = bound.method.row
    drive(bound)
    assert torch.equal(bound.method.row, before)
    assert not free.history[0].lost
    assert "above the bound" in bound.history[0].lost[0].why


def test_accuracy_on_each_clients_own_data():
    sim = simulate(FedAvg, FED, LAYOUT, rounds=1)
    drive(sim)
    found = client_scores(sim).rows()
    assert [f["samples"] for f in found] == FED.sizes.tolist()
    net = small_net().double()
    LAYOUT.write(sim.method.row, net)
    x, y = FED.train.x[FED.indices(3)].double(), FED.train.y[FED.indices(3)]
    assert found[3]["accuracy"] == pytest.approx((net(x).argmax(1) == y).double().mean().item())


def test_a_method_that_waits_for_nobody_is_an_error():
    class Stuck(FedAvg):
        def plan(self, until):
            return []

    with pytest.raises(RuntimeError, match="waits for replies that are not outstanding"):
        drive(simulate(Stuck, FED, LAYOUT))


def test_a_method_without_a_plan_is_not_a_method():
    with pytest.raises(TypeError, match="abstract"):
        Method(None)


def test_a_first_interrupt_waits_for_the_end_of_the_step_and_a_second_does_not():
    with DeferredInterrupt() as brake:
        brake.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            brake.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_other_handlers_and_threads_are_left_alone(monkeypatch):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *words: seen.append(words))
    try:
        with DeferredInterrupt() as brake:
            signal.raise_signal(signal.SIGINT)
            brake.check()
        assert len(seen) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    thread = threading.Thread(target=lambda: DeferredInterrupt().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_bar_waits_for_the_run_that_is_furthest_behind():
    out = io.StringIO()
    runs = [
        simulate(FedAvg, FED, LAYOUT, rounds=rounds, run_name=name) for name, rounds in (("a", 2), ("b", 2), ("c", 1))
    ]
    watcher = ProgressDisplay(Console(file=out, width=200), runs, ["fast", "slow", "short"])
    for run in runs:
        watcher.on_start(run)
    for position, round in ((0, 1), (2, 1), (0, 2), (1, 1), (1, 2)):
        watcher.on_round(runs[position], Record(round, {"accuracy": 0.5}))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/2", "2/2"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1.0, "2.0 rounds/s  0:00:01 left"), (50.0, "25 s/round  0:00:50 left")]
)
def test_slow_rounds_are_told_in_seconds(seconds, shown):
    out, run = io.StringIO(), simulate(FedAvg, FED, LAYOUT, rounds=4)
    watcher = ProgressDisplay(Console(file=out, width=200), [run], ["one"])
    watcher.on_start(run)
    watcher._begin -= seconds
    watcher.on_round(run, Record(2, {"accuracy": 0.5}))
    assert shown in out.getvalue()


def test_a_cycle_that_the_last_round_cuts_short_is_aggregated():
    sim = simulate(FedCat, FED, LAYOUT, rounds=2, k=3)
    start = sim.method.row
    drive(sim)
    assert not torch.equal(sim.method.row, start)
    assert sim.history[-1].metrics == score(sim)


def test_a_round_that_is_due_is_evaluated_once(monkeypatch):
    sim = simulate(FedAvg, FED, LAYOUT, rounds=4, k=3, evaluate_every=2)
    calls = []
    monkeypatch.setattr(
        "fedcat.runs.driver.evaluate", lambda jobs: [calls.append(len(sim.history)) or {"accuracy": 0.5} for _ in jobs]
    )
    drive(sim)
    assert calls == [1, 3]
