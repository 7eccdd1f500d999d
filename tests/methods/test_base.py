"""The contracts hold for methods that want more of them than FedAvg and FedCat do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from helpers import (
    DEVICES,
    apart,
    drive,
    federation,
    layout_of,
    one_by_one,
    simulate,
    small_net,
    step,
)
from torch import nn
from torch.nn import functional

from fedcat.core.errors import SettingError
from fedcat.core.rng import Purpose, random_stream, torch_seed
from fedcat.engines import StackedEngine
from fedcat.engines.gradients import trials
from fedcat.methods import FedAvg, FedCat
from fedcat.methods.average import weighted_mean
from fedcat.methods.base import Context, Outstanding, ServerWork, run_server_work
from fedcat.methods.client_memory import ClientMemory
from fedcat.methods.rounds import RoundMethod
from fedcat.methods.selection import FunctionSelector
from fedcat.methods.server_optimizer import Mean
from fedcat.models.nets import NETS
from fedcat.protocol.hop import Hop, HopId
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.reply import Reply

FED = federation([3, 9, 5, 12, 7, 4, 8, 6], shape=(1, 8, 8))


@dataclass(frozen=True)
class DriftRule(LocalRule):
    """Client memory: each client keeps the mean gradient of its last hop and leans against it next time."""

    strength: float = 0.5

    def gradient(self, g, p, start, sent, memory):
        return g - self.strength * memory["lean"] + 0.01 * (p - start)

    def after(self, p, lr, sent, memory):
        return p - lr * 0.001 * sent["common"]

    def finish(self, start, end, steps, lr, momentum, sent, memory):
        lean = (start - end) / (steps * lr) * (1 - momentum)
        return {"change": lean - memory["lean"]}, {"lean": lean}


class Drift(RoundMethod):
    """Keeps a row of memory for each client that took part and a common one, from what clients upload."""

    rule = DriftRule()

    def __init__(self, context):
        super().__init__(context)
        zero = context.start.new_zeros(context.layout.parameter_size)
        self.memory = ClientMemory({"lean": zero})
        self.common = zero

    def hop(self, round, slot, client, visit):
        return replace(super().hop(round, slot, client, visit), sent={"common": self.common})

    def reduce(self, hops, replies):
        ends = torch.stack([reply.end for reply in replies])
        self.common = self.common + torch.stack([r.uploads["change"] for r in replies]).mean(0) / 8
        return weighted_mean(ends, [1.0] * len(ends))

    def state(self):
        return {**super().state(), "common": self.common}

    def restore(self, state):
        super().restore(state)
        self.common = state["common"]


@dataclass(frozen=True)
class HintRule(LocalRule):
    """A loss of its own, with something sent beside the row and randomness of its own."""

    weight: float = 0.1

    def draw(self, rng, task, hop, steps):
        return {"noise": torch.from_numpy(rng.normal(size=(steps, 6, 64))).to(task.layout.dtype)}

    def loss(self, net, batch, beside):
        plain = super().loss(net, batch, beside)
        made = torch.tanh(beside.drawn["noise"] @ beside.sent["hint"])
        return plain + self.weight * functional.cross_entropy(net.head(made), beside.sent["labels"])

    def report(self, task, hop):
        return {"counts": torch.from_numpy(task.federation.class_counts[hop.client])}

    def finish(self, start, end, steps, lr, momentum, sent, memory):
        return {"shift": (end - start).mean(1, keepdim=True)}, {}


class Hint(RoundMethod):
    """Sends a matrix beside the row and trains it on the server on what the clients' models make of it."""

    rule = HintRule()

    def __init__(self, context):
        super().__init__(context)
        self.hint = torch.eye(64).to(context.start)
        self.labels = torch.arange(6, device=context.start.device)
        self.counts = []

    def hop(self, round, slot, client, visit):
        plain = super().hop(round, slot, client, visit)
        return replace(plain, sent={"hint": self.hint, "labels": self.labels})

    def reduce(self, hops, replies):
        layout = self.context.layout
        ends = torch.stack([reply.end for reply in replies])
        generator = torch.Generator().manual_seed(
            torch_seed(random_stream(self.context.seed, Purpose.SERVER, hops[0].round)),
        )
        noise = torch.randn(6, 64, generator=generator, dtype=torch.float64).to(ends)
        hint = self.hint.clone().requires_grad_()
        losses = []
        for end in ends:
            net = layout.bind(layout.unpack(end), {})
            losses.append(functional.cross_entropy(net.head(torch.tanh(noise @ hint)), self.labels))
        (slope,) = torch.autograd.grad(torch.stack(losses).sum(), hint)
        self.hint = (hint - 0.1 * slope).detach()
        self.counts += [reply.uploads["counts"].tolist() for reply in replies]
        return weighted_mean(ends, [reply.samples for reply in replies])


@dataclass(frozen=True)
class ContrastRule(LocalRule):
    """A loss that looks at where the client started and at what it was after its last hop."""

    def loss(self, net, batch, beside):
        now = net.features(batch.x)
        common = net.at(beside.start).features(batch.x)
        last = net.at(beside.memory["last"]).features(batch.x)
        pull = functional.cosine_similarity(now, common) - functional.cosine_similarity(now, last)
        return super().loss(net, batch, beside) - 0.5 * batch.mean(pull)

    def finish(self, start, end, steps, lr, momentum, sent, memory):
        return {}, {"last": end}


class Contrast(FedAvg):
    rule = ContrastRule()

    def __init__(self, context):
        super().__init__(context)
        self.memory = ClientMemory({"last": context.start[: context.layout.parameter_size]})


class Twice(FedAvg):
    """Draws the same client twice in a round."""

    def select(self, round):
        first, second, _ = super().select(round)
        return [first, second, first]


def run_both(method, device, dtype=torch.float64, net=None, **more):
    rows = []
    for engine in ("sequential", "stacked"):
        layout = layout_of(net() if net else small_net(), dtype, device)
        sim = simulate(method, FED, layout, engine, rounds=4, momentum=0.5, **more)
        drive(sim)
        rows.append((sim, sim.method.row))
    return rows


@pytest.mark.parametrize("device", DEVICES)
def test_client_memory_enters_with_the_hop_and_leaves_in_the_reply(device):
    (sequential, a), (stacked, b) = run_both(Drift, device)
    assert apart(b, a) < 1e-12
    took_part = {d for record in sequential.history for d in record.clients}
    assert len(sequential.method.memory) == len(took_part) < 9
    assert apart(stacked.method.common, sequential.method.common) < 1e-10
    plain = simulate(FedAvg, FED, sequential.task.layout, rounds=4, momentum=0.5)
    drive(plain)
    assert apart(plain.method.row, a) > 1e-6
    size, row = sequential.task.layout.parameter_size * 8, sequential.task.layout.size * 8
    assert sequential.ledger.down == sequential.ledger.up == 4 * 3 * (row + size)


@pytest.mark.parametrize("device", DEVICES)
def test_something_travels_beside_the_row_and_the_server_trains(device):
    def net():
        torch.manual_seed(0)
        return NETS.get("digits-cnn")((1, 8, 8), 10)

    (sequential, a), (stacked, b) = run_both(Hint, device, net=net)
    assert apart(b, a) < 1e-12
    assert apart(stacked.method.hint, sequential.method.hint) < 1e-12
    assert apart(sequential.method.hint, torch.eye(64).to(a)) > 1e-6
    row = sequential.task.layout.size * 8
    assert sequential.ledger.down == 4 * 3 * (row + 64 * 64 * 8 + 6 * 8)
    assert sequential.ledger.up == 4 * 3 * (row + 8 + 10 * 8)
    assert sequential.method.counts[-1] == FED.class_counts[sequential.history[-1].clients[-1]].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_sees_the_start_and_the_clients_memory(device):
    def net():
        torch.manual_seed(0)
        return NETS.get("digits-cnn")((1, 8, 8), 10)

    (sequential, a), (_, b) = run_both(Contrast, device, net=net)
    assert apart(b, a) < 1e-12
    layout = layout_of(net(), torch.float64, device)
    plain = simulate(FedAvg, FED, layout, rounds=4, momentum=0.5)
    drive(plain)
    assert apart(plain.method.row, a) > 1e-6
    assert len(sequential.method.memory) == len({d for record in sequential.history for d in record.clients})


@pytest.mark.parametrize("device", DEVICES)
def test_one_client_twice_in_a_round(device):
    (sequential, a), (_, b) = run_both(Twice, device)
    assert apart(b, a) < 1e-12
    jobs = simulate(Twice, FED, sequential.task.layout).plan()
    assert [hop.visit for _, hop in jobs] == [0, 0, 1]
    assert jobs[0][1].client == jobs[2][1].client
    ends = [reply.end for reply in sequential.engine.train(jobs)]
    assert not torch.equal(ends[0], ends[2])
    assert len(sequential.history[0].hops) == 3
    assert all(e.down == sequential.task.layout.size * 8 for e in sequential.history[0].hops)


@pytest.mark.parametrize("method", [FedAvg, FedCat, Drift, Twice])
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replies_one_by_one_and_out_of_order_give_the_same_bits(method, engine, dtype):
    layout = layout_of(small_net(), dtype)
    whole = simulate(method, FED, layout, engine, rounds=7, exact=True, momentum=0.5)
    drive(whole)
    for shuffle in range(3):
        single = simulate(method, FED, layout, engine, rounds=7, exact=True, momentum=0.5)
        one_by_one(single, shuffle)
        assert torch.equal(single.method.row, whole.method.row)
        assert [r.clients for r in single.history] == [r.clients for r in whole.history]
        assert [(r.up, r.down) for r in single.history] == [(r.up, r.down) for r in whole.history]
        assert [r.metrics for r in single.history] == [r.metrics for r in whole.history]


@pytest.mark.parametrize("method", [FedAvg, FedCat, Drift, Contrast])
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_restore_in_the_middle_of_a_round_changes_no_bit(method, engine):
    layout = layout_of(NETS.get("digits-cnn")((1, 8, 8), 10), torch.float32)
    words = {"rounds": 6, "exact": True, "momentum": 0.5, "options": {}}
    whole = simulate(method, FED, layout, engine, **words)
    drive(whole)
    broken = simulate(method, FED, layout, engine, **words)
    for _ in range(4):
        step(broken)
    jobs = broken.plan()
    kept = broken.engine.train(jobs)[1:]
    broken.method.absorb(kept[::-1])
    resumed = simulate(method, FED, layout, engine, **words)
    resumed.method.restore(broken.method.state())
    again = resumed.method.plan(6)
    assert jobs[0][1].id in {hop.id for hop in again}
    assert not {reply.hop for reply in kept} & {hop.id for hop in again}
    while again:
        resumed.method.absorb(resumed.engine.train([(resumed.task, hop) for hop in again]))
        again = resumed.method.plan(6)
    assert torch.equal(resumed.method.row, whole.method.row)


@dataclass(frozen=True)
class SummingRule(LocalRule):
    """Row algebra that adds up whole rows."""

    def gradient(self, g, p, start, sent, memory):
        return g / (1 + torch.linalg.vector_norm(g, dim=1, keepdim=True))

    def after(self, p, lr, sent, memory):
        return p - lr * 1e-4 * p.sum(1, keepdim=True)

    def finish(self, start, end, steps, lr, momentum, sent, memory):
        return {"product": (start * end).sum(1, keepdim=True)}, {}


class Summing(FedAvg):
    rule = SummingRule()

    def reduce(self, hops, replies):
        return super().reduce(hops, replies) * (1 + 1e-3 * torch.tanh(replies[0].uploads["product"]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed", [False, True])
def test_a_rules_row_algebra_gives_the_same_bits_whatever_is_beside(fixed, device, monkeypatch):
    if fixed:
        monkeypatch.setattr(trials, "_size_matters", lambda *given: True)
    torch.manual_seed(0)
    layout = layout_of(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 10)), torch.float32, device
    )

    def result(*companions):
        engine = StackedEngine(exact=True)
        pairs = [(Summing, 1), *companions]
        sims = [simulate(m, FED, layout, engine, k=k, rounds=4, clip=0.5) for m, k in pairs]
        drive(*sims)
        return sims[0].method.row

    alone = result()
    assert torch.equal(alone, result((FedAvg, 1)))
    assert torch.equal(alone, result((FedAvg, 5), (Summing, 2), (Drift, 3)))
    single = simulate(Summing, FED, layout, "sequential", k=1, rounds=4, clip=0.5)
    drive(single)
    assert apart(alone, single.method.row) < 1e-5


def test_methods_with_different_rules_share_a_launch():
    layout = layout_of(small_net())
    alone = [simulate(m, FED, layout, "sequential", rounds=4, momentum=b) for m, b in MIXED]
    for sim in alone:
        drive(sim)
    engine = simulate(FedAvg, FED, layout, "stacked").engine
    together = [simulate(m, FED, layout, engine, rounds=4, momentum=b) for m, b in MIXED]
    drive(*together)
    for one, other in zip(alone, together, strict=True):
        assert apart(other.method.row, one.method.row) < 1e-12


MIXED = [(FedAvg, 0.0), (Drift, 0.5), (FedCat, 0.9), (Twice, 0.3), (Drift, 0.0)]


def made_context(**more):
    layout = layout_of(small_net())
    return Context(3, layout, layout.pack(layout.net), np.array([5, 1, 4]), 2, 1, lambda r: 0.1, **more)


def test_what_a_context_is_unless_told():
    context = made_context()
    assert (context.clients, context.selector, context.average, context.exact, context.classes) == (
        3,
        None,
        None,
        False,
        0,
    )
    chosen = context.selection()
    assert isinstance(chosen, FunctionSelector)
    assert (chosen.seed, chosen.k, chosen.samples.tolist()) == (3, 2, [5, 1, 4])
    context.refuse_selector("no reason")


def test_the_users_selector_is_the_selection():
    mine = object()
    context = made_context(selector=mine)
    assert context.selection() is mine
    with pytest.raises(SettingError, match="selector cannot be set: it is a selection itself"):
        context.refuse_selector("it is a selection itself")


def test_a_hop_is_outstanding_from_its_plan_to_its_reply():
    hops = [Hop(round=0, client=i, start=torch.zeros(1), epochs=1, lr=0.1, copy=i + 4) for i in range(3)]
    waiting = Outstanding()
    assert waiting.start(hops[:2]) == hops[:2]
    assert waiting.start(hops) == hops[2:]
    assert waiting.copies() == {4, 5, 6}
    assert waiting.end(Reply(HopId(0, 5))) is hops[1]
    assert waiting.copies() == {4, 6}
    with pytest.raises(ValueError, match=r"copy=5, attempt=0\) is not outstanding"):
        waiting.end(Reply(HopId(0, 5)))
    waiting.clear()
    assert waiting.copies() == set()
    assert waiting.start(hops) == hops


class Work(ServerWork):
    def __init__(self, key, done):
        self._key, self.done = key, done

    def key(self):
        return self._key

    def run(self, works):
        self.done.append([work._key for work in works])
        assert self is works[0]


class OtherWork(Work):
    pass


def test_server_work_of_one_kind_and_key_is_done_together():
    done = []
    run_server_work([Work(1, done), None, Work(2, done), OtherWork(1, done), Work(1, done), Work(2, done)])
    assert done == [[1, 1], [2, 2], [1]]
    run_server_work([None])
    assert len(done) == 3


def test_a_plain_method_gives_no_advice_and_leaves_no_work():
    sim = simulate(FedAvg, FED, layout_of(small_net()))
    row = sim.method.row
    sim.method.close()
    assert (sim.method.advice(10, 10), sim.method.work(), sim.method.row is row) == ([], None, True)
    assert list(sim.method.models("mean")) == ["global"]


def test_the_server_optimizer_moves_the_parameters_and_leaves_the_buffers():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3), nn.Linear(3, 10))
    layout = layout_of(net)
    method = simulate(FedAvg, federation([4] * 6), layout, server_optimizer=Mean(0.5)).method
    size = layout.parameter_size
    row, mean = torch.zeros(layout.size).double(), torch.arange(layout.size).double()
    moved = method.step(row, mean)
    assert layout.size > size
    assert torch.equal(moved[:size], mean[:size] / 2)
    assert torch.equal(moved[size:], mean[size:])
