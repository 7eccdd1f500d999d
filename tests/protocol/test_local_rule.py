"""A rule reads what it is given: it may neither replace nor change it."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import drive, federation, layout_of, simulate, small_net
from torch.nn import functional

from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg
from fedcat.methods.client_memory import ClientMemory
from fedcat.methods.fedprox import ProximalRule
from fedcat.models.losses import cross_entropy, mse
from fedcat.protocol.local_rule import Batch, LocalRule, LossInputs, ReadOnly
from fedcat.protocol.task import Task

FED = federation([3, 9, 5, 12, 7, 4])


def trained(rule, engine, rounds=2):
    """Return the row after training with a rule whose clients remember one tensor called `kept`."""
    layout = layout_of(small_net(), torch.float64)

    class WithRule(FedAvg):
        def __init__(self, context):
            super().__init__(context)
            self.rule = rule
            self.memory = ClientMemory({"kept": context.start.new_zeros(context.layout.parameter_size)})

    sim = simulate(WithRule, FED, layout, engine, rounds=rounds, k=3, batch_size=4, momentum=0.5)
    drive(sim)
    return sim.method.row


@dataclass(frozen=True)
class Replaces(LocalRule):
    hook: str

    def gradient(self, g, p, start, sent, memory):
        if self.hook == "gradient":
            memory["kept"] = memory["kept"] + g
        return g + memory["kept"]

    def after(self, p, lr, sent, memory):
        if self.hook == "after":
            memory["kept"] = p
        return p

    def loss(self, net, batch, inputs):
        if self.hook == "loss":
            inputs.memory["kept"] = inputs.start
        return super().loss(net, batch, inputs)

    def finish(self, start, end, steps, lr, momentum, sent, memory):
        if self.hook == "finish":
            memory["kept"] = end - start
        return {}, {"kept": end - start}


@dataclass(frozen=True)
class ChangesInPlace(Replaces):
    def gradient(self, g, p, start, sent, memory):
        if self.hook == "gradient":
            memory["kept"].add_(g)
        if self.hook == "parameters":
            p.mul_(0.5)
        return g + memory["kept"]

    def after(self, p, lr, sent, memory):
        if self.hook == "after":
            p.mul_(0.5)
        return p

    def loss(self, net, batch, inputs):
        if self.hook == "loss":
            inputs.memory["kept"].add_(1.0)
        return LocalRule.loss(self, net, batch, inputs)

    def finish(self, start, end, steps, lr, momentum, sent, memory):
        if self.hook == "finish":
            memory["kept"].add_(end)
        return {}, {"kept": end - start}


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("hook", ["gradient", "after", "loss", "finish"])
def test_a_hook_that_sets_an_entry_of_the_memory_is_refused(hook, engine):
    with pytest.raises(SettingError, match="set 'kept', which is read-only; return new tensors"):
        trained(Replaces(hook), engine)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("hook", ["gradient", "parameters", "after", "loss", "finish"])
def test_a_hook_that_changes_a_tensor_in_place_is_refused(hook, engine):
    with pytest.raises(SettingError, match=r"ChangesInPlace\.\w+: a rule changed .* in place"):
        trained(ChangesInPlace(hook), engine)


def test_the_gradient_itself_may_be_changed_in_place():
    @dataclass(frozen=True)
    class Adds(LocalRule):
        in_place: bool

        def gradient(self, g, p, start, sent, memory):
            return g.add_(0.1 * (p - start)) if self.in_place else g + 0.1 * (p - start)

        def finish(self, start, end, steps, lr, momentum, sent, memory):
            return {}, {"kept": end}

    rows = [trained(Adds(in_place), engine) for in_place in (False, True) for engine in ("sequential", "stacked")]
    for row in rows[1:]:
        assert torch.allclose(row, rows[0], atol=1e-12)


def test_a_read_only_mapping_reads_as_a_dictionary_does():
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    view = ReadOnly(tensors)
    assert list(view) == ["a", "b"]
    assert len(view) == 2
    assert view["a"] is tensors["a"]
    assert "c" not in view
    assert view.get("c") is None
    with pytest.raises(KeyError, match="there is no tensor 'c', only: a, b"):
        view["c"]


def test_the_mean_over_a_batch_leaves_out_padded_places():
    values = torch.tensor([1.0, 3.0, 100.0])
    assert Batch(values, values).mean(values) == pytest.approx(104 / 3)
    assert Batch(values, values, torch.tensor([1.0, 1.0, 0.0])).mean(values) == 2.0


@dataclass(frozen=True)
class Calibrated(LocalRule):
    """Weights every sample's loss by its client's share of the label."""

    def local(self, task, client):
        return {"counts": torch.from_numpy(task.federation.class_counts[client])}

    def loss(self, net: object, batch: Batch, inputs: LossInputs):
        shares = inputs.local["counts"] / inputs.local["counts"].sum()
        losses = functional.cross_entropy(net.logits(batch.x), batch.y, reduction="none")
        return batch.mean(shares[batch.y].to(losses) * losses)

    def finish(self, start, end, steps, lr, momentum, sent, memory):
        return {}, {"kept": end}


def test_a_loss_sees_its_own_clients_label_counts_in_every_engine():
    a, b = (trained(Calibrated(), engine) for engine in ("sequential", "stacked"))
    assert torch.allclose(a, b, atol=1e-12)
    assert not torch.allclose(a, trained(Replaces("none"), "sequential"), atol=1e-4)


def test_what_a_loss_knows_of_its_own_data_does_not_travel():
    layout = layout_of(small_net(), torch.float32)

    class Calibrating(FedAvg):
        rule = Calibrated()

        def __init__(self, context):
            super().__init__(context)
            self.memory = ClientMemory({"kept": context.start.new_zeros(context.layout.parameter_size)})

    sims = [simulate(method, FED, layout, "stacked", rounds=2, k=3) for method in (FedAvg, Calibrating)]
    for sim in sims:
        drive(sim)
    assert sims[0].ledger.total == sims[1].ledger.total > 0


ROWS = torch.arange(6.0).view(2, 3)


@dataclass(frozen=True)
class OwnLoss(LocalRule):
    weight: float = 1.0

    def loss(self, net, batch, inputs):
        return super().loss(net, batch, inputs)


@dataclass(frozen=True)
class OwnStep(LocalRule):
    def after(self, p, lr, sent, memory):
        return p


def test_the_loss_is_the_mean_cross_entropy():
    layout = layout_of(small_net())
    torch.manual_seed(0)
    x, y = torch.randn(5, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 3, 9, 3, 1])
    net = layout.bind(layout.unpack(layout.pack(layout.net)), {})
    inputs = LossInputs(torch.zeros(1), {}, {}, {}, {})
    found = LocalRule().loss(net, Batch(x, y), inputs)
    assert torch.allclose(found, functional.cross_entropy(layout.net(x), y))
    mask = torch.tensor([1, 1, 1, 0, 0], dtype=torch.float64)
    found = LocalRule().loss(net, Batch(x, y, mask), inputs)
    assert torch.allclose(found, functional.cross_entropy(layout.net(x[:3]), y[:3]))


def test_a_plain_rule_changes_sends_keeps_and_draws_nothing():
    rule = LocalRule()
    assert rule.gradient(ROWS, 2 * ROWS, 3 * ROWS, {}, {}) is ROWS
    assert rule.after(ROWS, torch.ones(2, 1), {}, {}) is ROWS
    assert rule.finish(ROWS, ROWS, *[torch.ones(2, 1)] * 3, {}, {}) == ({}, {})
    assert rule.draw(np.random.default_rng(0), None, None, 3) == {}
    assert rule.report(None, None) == {}
    assert rule.local(None, 0) == {}


def test_a_rule_that_overrides_row_algebra_is_not_elementwise_unless_it_says_so():
    class Pulled(ProximalRule):
        pass

    class Normed(ProximalRule):
        def gradient(self, g, p, start, sent, memory):
            return super().gradient(g, p, start, sent, memory) / g.norm(dim=1, keepdim=True)

    class Doubled(ProximalRule):
        elementwise = True

        def after(self, p, lr, sent, memory):
            return 2 * p

    assert [rule.elementwise for rule in (LocalRule, Pulled, Normed, Doubled)] == [False, True, False, True]


def test_rules_that_share_the_loss_share_a_launch():
    assert (LocalRule().own_loss, OwnStep().own_loss, OwnLoss().own_loss) == (False, False, True)

    def key(rule, loss=cross_entropy):
        return Task(0, None, None, None, rule, 1, loss=loss).loss_key

    assert key(LocalRule()) == key(OwnStep())
    assert key(LocalRule()) != key(LocalRule(), mse)
    assert key(LocalRule()) != key(OwnLoss())
    assert key(OwnLoss(1.0)) == key(OwnLoss(1.0))
    assert key(OwnLoss(1.0)) != key(OwnLoss(2.0))
    assert [Task(0, None, None, None, rule, 1).plain_loss for rule in (LocalRule(), OwnStep(), OwnLoss())] == [
        *(True, True, False),
    ]
    assert not Task(0, None, None, None, LocalRule(), 1, loss=mse).plain_loss
