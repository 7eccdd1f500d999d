"""The driver: barriers, deadlines, busy clients, replies that are late, repeated or of nobody."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from weakref import ref

import pytest
import torch
from helpers import Unordered, drive, federation, layout_of, simulate, small_net

from fedcat import engines
from fedcat.methods import FedAvg, FedCat
from fedcat.protocol.hop import HopId
from fedcat.protocol.reply import Reply, Status
from fedcat.runs.callbacks import Callback
from fedcat.runs.driver import Driver

FED = federation([3, 9, 5, 12, 7, 4])
LAYOUT = layout_of(small_net())


class Clocked(engines.Engine):
    """Trains at once, and delivers the replies of some clients only after so many calls of collect."""

    name = "clocked"

    def __init__(self, slow: dict[int, int], one_per_client: bool = False) -> None:
        super().__init__()
        self.inner, self.slow, self.one_per_client = engines.make("sequential"), slow, one_per_client
        self.waiting: list[list] = []
        self.at_once: list[list[int]] = []

    def submit(self, jobs):
        for job in jobs:
            (reply,) = self.inner.train([job])
            self.waiting.append([self.slow.get(job[1].client, 0), job[1].client, reply])

    def collect(self, timeout=None):
        if not self.waiting:
            raise RuntimeError("nothing to collect")
        self.at_once.append([client for _, client, _ in self.waiting])
        ready = [entry for entry in self.waiting if entry[0] <= 0]
        if not ready and timeout is not None:
            time.sleep(timeout)
        for entry in self.waiting:
            entry[0] -= 1
        self.waiting = [entry for entry in self.waiting if entry not in ready]
        return [reply for _, _, reply in ready]


def test_a_deadline_turns_a_slow_hop_into_a_late_one_and_its_bytes_count_when_they_come():
    run = simulate(FedAvg, FED, LAYOUT, Clocked({0: 3}), k=6, rounds=4)
    drive(run, deadline=0.02)
    model = LAYOUT.size * 8
    late = [hop for record in run.history for hop in record.lost]
    assert {hop.client for hop in late} == {0}
    assert {(hop.status, hop.why) for hop in late} == {("late", "no reply within 0.02 s")}
    assert len(late) >= 1
    assert run.ledger.down == 4 * 6 * model
    arrived = sum(hop.arrived for record in run.history for hop in record.hops)
    assert arrived + len(late) == 24
    assert run.ledger.up >= arrived * model
    assert run.ledger.up > arrived * model or run.engine.waiting


def test_without_a_deadline_a_slow_client_is_waited_for():
    slow, fast = (simulate(FedAvg, FED, LAYOUT, Clocked(slow), k=6, rounds=3) for slow in ({0: 4, 3: 2}, {}))
    drive(slow)
    drive(fast)
    assert torch.equal(slow.method.row, fast.method.row)
    assert not any(record.lost for record in slow.history)


def test_copies_of_fedcat_do_not_wait_for_each_other_without_a_barrier():
    rounds = {}
    for barrier in (True, False):
        engine = Clocked({0: 5, 1: 5})
        run = simulate(FedCat, FED, LAYOUT, engine, k=3, rounds=6, seed=1)
        ahead = [0]
        original = run.plan

        def plan(until=None, run=run, original=original, ahead=ahead):
            jobs = original(until)
            ahead.append(max((hop.round for _, hop in jobs), default=0) - run.method.round)
            return jobs

        run.plan = plan
        drive(run, barrier=barrier)
        rounds[barrier] = (max(ahead), run.method.row)
    assert rounds[True][0] == 0
    assert rounds[False][0] > 0
    assert torch.equal(rounds[True][1], rounds[False][1])


def test_a_busy_client_trains_one_hop_at_a_time():
    def only_two(round, rng, samples, k):
        return [0, 1, 0, 1]

    from fedcat.methods.selection import make_selector

    made = []
    for one in (True, False):
        engine = Clocked({}, one_per_client=one)
        run = simulate(FedAvg, FED, LAYOUT, engine, k=4, rounds=2, selector=make_selector(only_two, 0, FED.sizes, 4))
        drive(run)
        made.append((run, engine))
    (careful, engine), (plain, other) = made
    assert all(len(set(clients)) == len(clients) for clients in engine.at_once)
    assert any(len(set(clients)) < len(clients) for clients in other.at_once)
    assert torch.equal(careful.method.row, plain.method.row)


def test_a_busy_client_of_a_late_hop_is_not_asked_again_before_it_has_answered():
    engine = Clocked({0: 3}, one_per_client=True)
    run = simulate(FedAvg, FED, LAYOUT, engine, k=6, rounds=5)
    driver = Driver([run], deadline=0.02)
    waited = 0
    while driver.active:
        driver.step()
        assert [client for _, client, _ in engine.waiting].count(0) <= 1
        waited += bool(engine.waiting)
    assert waited
    assert len(run.history) == 5


def test_a_client_that_never_answers_stops_nobody_and_is_sent_nothing_more():
    engine = Clocked({0: 10**6}, one_per_client=True)
    run = simulate(FedAvg, FED, LAYOUT, engine, k=6, rounds=3)
    drive(run, deadline=0.03)
    lost = [hop for record in run.history for hop in record.lost]
    assert [(hop.client, hop.status) for hop in lost] == [(0, "late")] * 3
    assert [hop.why.split()[0] for hop in lost] == ["no", "the", "the"]  # no reply; the client was busy
    model = LAYOUT.size * 8
    assert [hop.down for hop in lost] == [model, 0, 0]
    assert (run.ledger.down, run.ledger.up) == (16 * model, 15 * model)
    assert run.history[-1].down == run.ledger.down


def test_replies_that_nobody_asked_for_change_nothing():
    class Chatty(engines.SequentialEngine):
        def train(self, jobs):
            replies = super().train(jobs)
            task, hop = jobs[0]
            strange = Reply(HopId(99, 0), run=task.run, end=hop.start * 7, samples=5, steps=1)
            foreign = Reply(hop.id, run="another run", end=hop.start * 7, samples=5, steps=1)
            return [strange, foreign, *replies, *replies]

    odd, plain = (simulate(FedCat, FED, LAYOUT, engine, rounds=4) for engine in (Chatty(), "sequential"))
    drive(odd)
    drive(plain)
    assert torch.equal(odd.method.row, plain.method.row)
    assert (odd.ledger.up, odd.ledger.down) == (plain.ledger.up, plain.ledger.down)


def test_a_run_that_is_stopped_leaves_its_hops_behind():
    class Stop(Callback):
        def on_round(self, run, record):
            run.stop()

    engine = Clocked({0: 6, 1: 6})
    short, whole = (simulate(FedCat, FED, LAYOUT, engine, k=3, rounds=6, seed=seed) for seed in (1, 2))
    short.callbacks = [Stop()]
    drive(short, whole, barrier=False)
    assert (short.status, whole.status) == ("stopped", "finished")
    alone = drive(simulate(FedCat, FED, LAYOUT, k=3, rounds=6, seed=2))
    assert torch.equal(whole.method.row, alone.method.row)


def test_runs_of_one_name_are_refused():
    runs = [simulate(FedAvg, FED, LAYOUT, run_name="same") for _ in range(2)]
    with pytest.raises(ValueError, match="different names"):
        Driver(runs)


def test_an_engine_that_owes_nothing_has_nothing_to_collect():
    with pytest.raises(RuntimeError, match="nothing to collect"):
        engines.make("sequential").collect()
    with pytest.raises(TypeError, match="must define train, or submit and collect"):

        class Half(engines.Engine):
            def submit(self, jobs):
                pass


def test_train_follows_from_submit_and_collect():
    run = simulate(FedAvg, FED, LAYOUT, k=4)
    jobs = run.plan()
    engine = Unordered(engines.make("sequential"), seed=3)
    found = engine.train(jobs)
    assert [reply.hop for reply in found] == [hop.id for _, hop in jobs]
    assert all(reply.status is Status.ARRIVED for reply in found)


def test_jobs_of_several_runs_share_a_launch():
    sizes = []

    class Counted(engines.StackedEngine):
        def train(self, jobs):
            sizes.append(len(jobs))
            return super().train(jobs)

    engine = Counted()
    drive(*(simulate(method, FED, LAYOUT, engine, k=3, rounds=2) for method in (FedAvg, FedCat)))
    assert sizes == [6, 6]


def test_seconds_of_runs_that_share_launches_are_shares():
    engine = engines.make("stacked")
    pair = [simulate(FedAvg, FED, LAYOUT, engine, k=3, rounds=2) for _ in range(2)]
    drive(*pair)
    alone = drive(simulate(FedAvg, FED, LAYOUT, "stacked", k=3, rounds=2))
    assert alone.alone
    assert alone.summary().seconds_estimated is False
    assert not any(run.alone for run in pair)
    assert all(run.seconds > 0 for run in pair)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_garbage_collector_skips_what_was_there_before_while_runs_are_driven(error):
    frozen = []

    def between():
        frozen.append(gc.get_freeze_count())
        if error is not None:
            raise error

    run = simulate(FedAvg, FED, LAYOUT, rounds=2)
    with pytest.raises(error) if error else nullcontext():
        Driver([run]).run(between)
    assert min(frozen) > 10_000
    assert gc.get_freeze_count() == 0


def test_an_engine_that_frees_memory_also_frees_what_the_collector_leaves_out(monkeypatch):
    class Cycle:
        def __init__(self):
            self.own = self

    left = ref(Cycle())
    gc.freeze()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    engines.make("stacked").release()
    assert left() is None
