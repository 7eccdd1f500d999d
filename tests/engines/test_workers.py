"""Processes that train give the bits that one process gives, and fail in a way that can be read."""

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import pytest
import torch
from helpers import (
    digits_net,
    drive,
    federation,
    layout_of,
    simulate,
    small_net,
    step,
)
from hypothesis import given
from hypothesis import strategies as st

import fedcat
from fedcat.core.errors import SettingError
from fedcat.engines import SequentialEngine, StackedEngine, WorkersEngine, can_fork, make
from fedcat.engines.workers import PATIENCE, STEP, divide, divide_stacks
from fedcat.methods import FedAvg, FedCat, FedGen, Scaffold
from fedcat.protocol.local_rule import LocalRule

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes that train need Linux and no GPU")

SIZES = [3, 9, 5, 12, 7, 4]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("method", [FedCat, Scaffold, FedGen])
@pytest.mark.parametrize("name", ["sequential", "stacked"])
def test_the_bits_are_those_of_one_process(name, method):
    fed, rows = federation(SIZES), []
    for workers in (1, 2, 3):
        layout = layout_of(digits_net(), torch.float32)
        engine = make(name, exact=True, workers=workers)
        assert isinstance(engine, WorkersEngine) == (workers > 1)
        sim = simulate(method, fed, layout, engine, exact=True, rounds=3, k=4, momentum=0.5)
        drive(sim)
        engine.release()
        rows.append((sim.method.row, [record.train_loss for record in sim.history]))
    for row, losses in rows[1:]:
        assert torch.equal(row, rows[0][0])
        assert losses == rows[0][1]


def test_simulations_that_come_later_are_known():
    engine, layout, fed = WorkersEngine(StackedEngine(), 2), layout_of(small_net()), federation(SIZES)
    first = simulate(FedAvg, fed, layout, engine, rounds=2, seed=1)
    drive(first)
    processes = [process.pid for process, _ in engine._workers]
    second = simulate(FedAvg, fed, layout, engine, rounds=2, seed=2)
    drive(second)
    again = simulate(FedAvg, fed, layout, SequentialEngine(), rounds=2, seed=2)
    drive(again)
    assert torch.allclose(second.method.row, again.method.row, atol=1e-12)
    assert not set(processes) & {process.pid for process, _ in engine._workers}
    engine.release()


def test_release_ends_the_processes_and_train_starts_new_ones():
    engine = WorkersEngine(SequentialEngine(), 2)
    sim = simulate(FedAvg, federation(SIZES), layout_of(small_net()), engine, rounds=2)
    step(sim)
    processes = [process for process, _ in engine._workers]
    assert all(process.is_alive() for process in processes)
    engine.release()
    assert not any(process.is_alive() for process in processes)
    step(sim)
    assert sim.done
    engine.release()


class Failing(LocalRule):
    def loss(self, net, batch, beside):
        raise SettingError("alpha must be > 0, got -1")


class Unportable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Strange(LocalRule):
    def loss(self, net, batch, beside):
        raise Unportable("this", "that")


@pytest.mark.parametrize(
    ("rule", "error", "text"),
    [(Failing(), SettingError, "alpha must be"), (Strange(), RuntimeError, "Unportable: this and that")],
)
def test_an_error_in_a_process_is_raised_here(rule, error, text):
    class Own(FedAvg):
        pass

    Own.rule = rule
    engine = WorkersEngine(SequentialEngine(), 2)
    sim = simulate(Own, federation(SIZES), layout_of(small_net()), engine)
    with pytest.raises(error, match=text):
        drive(sim)
    engine.release()


def test_a_process_that_is_killed_is_missed():
    engine = WorkersEngine(SequentialEngine(), 2)
    sim = simulate(FedAvg, federation(SIZES), layout_of(small_net()), engine, rounds=5)
    step(sim)
    os.kill(engine._workers[0][0].pid, signal.SIGKILL)
    time.sleep(0.1)
    with pytest.raises(RuntimeError, match=r"ended unexpectedly, exit code -9 \(killed"):
        drive(sim)
    assert not engine._workers
    sim = simulate(FedAvg, federation(SIZES), layout_of(small_net()), engine, rounds=2)
    drive(sim)
    engine.release()


def test_an_answer_that_nobody_fetched_is_not_taken_for_the_next(monkeypatch):
    engine, layout, fed = WorkersEngine(SequentialEngine(), 2), layout_of(small_net()), federation(SIZES)
    sim = simulate(FedAvg, fed, layout, engine, rounds=3)
    step(sim)
    jobs = sim.plan()

    def interrupted(process, pipe):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedcat.engines.workers._answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.train(jobs)
    others = [(task, replace(hop, round=hop.round + 100)) for task, hop in jobs]
    assert [reply.hop for reply in engine.train(others)] == [hop.id for _, hop in others]
    assert engine.train([]) == []
    engine.release()


class Unsendable(LocalRule):
    def report(self, task, hop):
        return {"quarter": torch.zeros(2, dtype=torch.float8_e5m2)}


def test_a_reply_that_cannot_travel_is_an_error_and_no_death():
    class Own(FedAvg):
        rule = Unsendable()

    engine = WorkersEngine(SequentialEngine(), 2)
    sim = simulate(Own, federation(SIZES), layout_of(small_net()), engine)
    with pytest.raises(TypeError, match="Float8"):
        drive(sim)
    assert all(process.is_alive() for process, _ in engine._workers)
    engine.release()


@dataclass(frozen=True)
class Halves(LocalRule):
    def report(self, task, hop):
        return {"half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}


def test_numbers_that_numpy_does_not_know_travel():
    seen = []

    class Own(FedAvg):
        rule = Halves()

        def absorb(self, replies):
            seen.extend(reply.uploads["half"] for reply in replies)
            super().absorb(replies)

    engine = WorkersEngine(SequentialEngine(), 2)
    drive(simulate(Own, federation(SIZES), layout_of(small_net()), engine, rounds=1))
    engine.release()
    assert all(torch.equal(half, torch.tensor([1.5, -2.0], dtype=torch.bfloat16)) for half in seen)
    assert len(seen) == 3


def _parent(pipe):
    engine = WorkersEngine(SequentialEngine(), 3)
    step(simulate(FedAvg, federation(SIZES), layout_of(small_net()), engine))
    pipe.send([process.pid for process, _ in engine._workers])
    time.sleep(60)


def _running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"  # dead, but not yet fetched by whoever inherited it


def test_the_processes_end_with_a_parent_that_is_killed():
    """They notice it at once, because none of them holds another end of its pipe, and not only after some patience."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    parent = context.Process(target=_parent, args=(theirs,))
    parent.start()
    assert ours.poll(60)
    workers = ours.recv()
    assert [_running(pid) for pid in workers] == [True] * 3
    parent.kill()
    parent.join()
    end = time.monotonic() + 0.8 * PATIENCE
    while any(map(_running, workers)) and time.monotonic() < end:
        time.sleep(0.02)
    left = [pid for pid in workers if _running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def _accuracy(seed):
    return fedcat.run(dataset="digits", clients=20, rounds=1, epochs=1, seed=seed, workers=2).accuracy


def test_a_run_in_a_pool_of_processes_trains_in_its_own():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_accuracy, [3]) == [_accuracy(3)]


def test_processes_that_cannot_be_made_are_an_error_that_says_so(monkeypatch):
    def start(self):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.context.ForkProcess.start", start)
    engine = WorkersEngine(SequentialEngine(), 2)
    with pytest.raises(RuntimeError, match=r"cannot start 2 processes .* use fewer --workers"):
        drive(simulate(FedAvg, federation(SIZES), layout_of(small_net()), engine, rounds=1))


def test_work_is_divided_evenly():
    assert [sum([5, 1, 4, 2, 2][i] for i in share) for share in divide([5, 1, 4, 2, 2], 2)] in ([7, 7], [8, 6], [6, 8])
    assert divide([1], 3) == [[0], [], []]
    shares = divide(list(range(100)), 4)
    assert sorted(position for share in shares for position in share) == list(range(100))
    sums = [sum(share) for share in shares]
    assert max(sums) - min(sums) <= 4


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(2, 3))
def test_stacks_are_divided_so_that_the_dearest_is_cheapest(steps, parts):
    def cost(share):
        return STEP * max(steps[i] for i in share) + sum(steps[i] for i in share) if share else 0

    shares = divide_stacks(steps, parts)
    assert len(shares) == parts
    assert sorted(position for share in shares for position in share) == list(range(len(steps)))
    order = sorted(range(len(steps)), key=lambda i: -steps[i])
    cuts = combinations_with_replacement(range(len(steps) + 1), parts - 1)
    ways = ([order[a:b] for a, b in pairwise([0, *cut, len(steps)])] for cut in cuts)
    assert max(map(cost, shares)) == min(max(map(cost, way)) for way in ways)


def test_the_dearest_hop_goes_first_and_to_the_cheapest_process():
    assert divide([5, 1, 4, 2, 2], 2) == [[0, 4], [2, 3, 1]]
    assert divide([1, 1, 1, 9], 2) == [[3], [0, 1, 2]]


def test_an_engine_of_processes_is_exact_and_precise_as_its_inner_one():
    inner = StackedEngine(exact=True, precision="bf16", memory=3.0)
    engine = WorkersEngine(inner, 2)
    assert (engine.exact, engine.precision, engine.memory, engine.name) == (True, "bf16", 3.0, "stacked")


def test_replies_come_in_the_order_of_the_jobs_whoever_trained_them():
    engine = WorkersEngine(SequentialEngine(), 2)
    sim = simulate(FedAvg, federation([3, 30, 5, 12, 7, 4]), layout_of(small_net()), engine, k=6)
    jobs = sim.plan()
    ends = [reply.end for reply in SequentialEngine().train(jobs)]
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 0, 4, 1, 3], [3]):
        replies = engine.train([jobs[i] for i in order])
        assert [reply.hop for reply in replies] == [jobs[i][1].id for i in order]
        assert all(torch.equal(reply.end, ends[i]) for reply, i in zip(replies, order, strict=True))
    engine.release()
