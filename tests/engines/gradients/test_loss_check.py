"""A rule's own loss is tested before it trains in a stack, where batches are padded."""

from dataclasses import dataclass

import pytest
import torch
from helpers import DEVICES, Lines, drive, federation, layout_of, simulate, small_net
from torch import nn
from torch.nn import functional

from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg
from fedcat.protocol.local_rule import LocalRule

FED = federation([3, 9, 5, 12, 7, 4])


def run(rule, engine="stacked", net=None, device="cpu", dtype=torch.float64, **words):
    class WithRule(FedAvg):
        def __init__(self, context):
            super().__init__(context)
            self.rule = rule

    layout = layout_of(net or small_net(), dtype, device)
    sim = simulate(WithRule, FED, layout, engine, **{"rounds": 2, "k": 3, "batch_size": 4, **words})
    drive(sim)
    return sim.method.row


@dataclass(frozen=True)
class Unmasked(LocalRule):
    def loss(self, net, batch, inputs):
        return functional.cross_entropy(net.logits(batch.x), batch.y)


@dataclass(frozen=True)
class DividedByLength(LocalRule):
    """Leaves out padded places but counts them."""

    def loss(self, net, batch, inputs):
        losses = functional.cross_entropy(net.logits(batch.x), batch.y, reduction="none")
        return (losses if batch.mask is None else losses * batch.mask).sum() / len(batch.y)


@dataclass(frozen=True)
class Masked(LocalRule):
    def loss(self, net, batch, inputs):
        return batch.mean(functional.cross_entropy(net.logits(batch.x), batch.y, reduction="none"))


@dataclass(frozen=True)
class Normalizes(LocalRule):
    """Normalizes the outputs over the batch, padded places included."""

    def loss(self, net, batch, inputs):
        return batch.mean(batch.losses(functional.batch_norm(net.logits(batch.x), None, None, training=True)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", [Unmasked(), DividedByLength(), Normalizes()])
def test_a_loss_that_padding_changes_is_refused_with_the_remedy(rule, device):
    with pytest.raises(SettingError, match=r"loss changes if its batch is padded.*batch\.mean\(losses\).*sequential"):
        run(rule, device=device, batch_size=8)


def test_the_sequential_engine_never_pads_and_takes_such_a_loss():
    assert torch.allclose(run(Unmasked(), "sequential"), run(Masked(), "stacked"), atol=1e-12)


def normalized():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 10))


@dataclass(frozen=True)
class TwoViews(LocalRule):
    """Trains on two views of each sample, which pass the net together."""

    def loss(self, net, batch, inputs):
        one, other = net.logits(torch.cat([batch.x, 1.1 * batch.x])).chunk(2)
        return batch.mean(batch.losses(one) + 0.1 * (one - other).square().sum(1))


@pytest.mark.parametrize("rule", [Masked(), TwoViews()])
@pytest.mark.parametrize("batch_size", [2, 4, 100])
def test_batch_normalization_leaves_out_what_pads_a_batch(batch_size, rule):
    words = {"batch_size": batch_size, "join_lone": True}
    rows = [run(rule, engine, normalized(), **words) for engine in ("sequential", "stacked")]
    assert torch.allclose(*rows, atol=1e-10)
    with pytest.raises(SettingError, match="loss changes if its batch is padded"):
        run(Unmasked(), "stacked", normalized(), **words)


@pytest.mark.parametrize("others", [5, 6, 10])
def test_batch_normalization_of_other_samples_needs_the_sequential_engine(others):
    @dataclass(frozen=True)
    class Anchored(LocalRule):
        """Also sees samples that are no batch, some of which are as many as a padded batch or two have."""

        def loss(self, net, batch, inputs):
            anchors = torch.linspace(-1, 1, others * 64, dtype=batch.x.dtype).view(others, 64)
            return super().loss(net, batch, inputs) + net.logits(anchors).square().mean()

    with pytest.raises(SettingError, match='engine="sequential"'):
        run(Anchored(), "stacked", normalized(), batch_size=4, join_lone=True)
    run(Anchored(), "sequential", normalized(), batch_size=4, join_lone=True)


def lines():
    torch.manual_seed(0)
    return Lines(nn.GRU)


@dataclass(frozen=True)
class Towards(LocalRule):
    """Adds the squares of the gradient where training started."""

    def loss(self, net, batch, inputs):
        def first(p):
            return batch.mean(batch.losses(net.at(p).logits(batch.x)))

        own = batch.mean(batch.losses(net.logits(batch.x)))
        return own + torch.func.grad(first)(inputs.start).square().sum()


@pytest.mark.parametrize("device", DEVICES)
def test_losses_see_recurrent_nets(device):
    rows = [run(Masked(), engine, lines(), device) for engine in ("sequential", "stacked")]
    assert torch.allclose(*rows, atol=1e-10)


def test_second_derivatives_of_recurrent_nets_are_refused_in_stacks():
    assert run(Towards(), "sequential", lines()).isfinite().all()
    with pytest.raises(SettingError, match=r"cannot run for several clients.*sequential"):
        run(Towards(), "stacked", lines())


def test_a_loss_that_vmap_cannot_run_is_refused_with_the_reason():
    @dataclass(frozen=True)
    class Branches(LocalRule):
        def loss(self, net, batch, inputs):
            found = super().loss(net, batch, inputs)
            return found if found > 0 else -found

    with pytest.raises(SettingError, match=r"Branches\.loss cannot run for several clients at once.*sequential"):
        run(Branches())
    assert torch.isfinite(run(Branches(), "sequential")).all()


def test_a_loss_per_sample_is_refused():
    @dataclass(frozen=True)
    class PerSample(LocalRule):
        def loss(self, net, batch, inputs):
            return functional.cross_entropy(net.logits(batch.x), batch.y, reduction="none")

    with pytest.raises(SettingError, match=r"PerSample\.loss must return a scalar, got shape \(\d+,\)"):
        run(PerSample())


def test_a_loss_is_tried_once_for_each_net(monkeypatch):
    from fedcat.engines import stacked

    tried = []
    monkeypatch.setattr(stacked, "check_loss", tried.append)
    run(Masked(), rounds=4)
    assert len(tried) == 1


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_the_trial_holds_for_every_batch_size(batch_size):
    with pytest.raises(SettingError, match="padded"):
        run(Unmasked(), batch_size=batch_size)
    assert torch.isfinite(run(Masked(), batch_size=batch_size)).all()


def test_a_small_term_on_padded_places_is_noticed():
    @dataclass(frozen=True)
    class SmallTerm(LocalRule):
        def loss(self, net, batch, inputs):
            return super().loss(net, batch, inputs) + 1e-4 * net.logits(batch.x).square().mean()

    for dtype in (torch.float64, torch.float32):
        with pytest.raises(SettingError, match="changes if its batch is padded"):
            run(SmallTerm(), dtype=dtype)


def test_errors_of_the_loss_itself_are_raised_as_they_are():
    @dataclass(frozen=True)
    class Typo(LocalRule):
        def loss(self, net, batch, inputs):
            return super().loss(net, batch, inputs) * inputs.local["margn"]

    @dataclass(frozen=True)
    class Unfinished(LocalRule):
        def loss(self, net, batch, inputs):
            raise NotImplementedError

    with pytest.raises(KeyError, match="margn"):
        run(Typo())
    with pytest.raises(NotImplementedError):
        run(Unfinished())


@dataclass(frozen=True)
class Focal(LocalRule):
    def loss(self, net, batch, inputs):
        losses = functional.cross_entropy(net.logits(batch.x), batch.y, reduction="none")
        return batch.mean((1 - (-losses).exp()) ** 2 * losses)


@dataclass(frozen=True)
class Distilled(LocalRule):
    def loss(self, net, batch, inputs):
        teacher = net.at(inputs.start).logits(batch.x).softmax(-1).detach()
        logits = net.logits(batch.x)
        own = functional.cross_entropy(logits, batch.y, reduction="none")
        return batch.mean(own + functional.cross_entropy(logits, teacher, reduction="none"))


@dataclass(frozen=True)
class Noisy(LocalRule):
    def draw(self, rng, task, hop, steps):
        return {"noise": torch.from_numpy(rng.normal(size=(steps, task.batch_size + 1, 10)))}

    def loss(self, net, batch, inputs):
        noise = inputs.drawn["noise"][: len(batch.y)].to(batch.x.dtype)
        return batch.mean(functional.cross_entropy(net.logits(batch.x) + noise, batch.y, reduction="none"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [Focal(), Distilled(), Noisy()], ids=lambda rule: type(rule).__name__)
def test_losses_that_leave_out_padded_places_are_taken(rule, dtype, device):
    rows = [run(rule, engine, device=device, dtype=dtype) for engine in ("sequential", "stacked")]
    assert torch.allclose(*rows, atol=1e-4 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("hook", ["draw", "report"])
def test_hooks_that_get_the_hop_may_not_change_it(hook, engine):
    @dataclass(frozen=True)
    class Changes(LocalRule):
        def draw(self, rng, task, given, steps):
            if hook == "draw":
                given.start.add_(1.0)
            return {}

        def report(self, task, given):
            if hook == "report":
                given.start.add_(1.0)
            return {}

        def loss(self, net, batch, inputs):
            return super().loss(net, batch, inputs)

    with pytest.raises(SettingError, match=rf"Changes\.{hook}: a rule changed one of its arguments in place"):
        run(Changes(), engine)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_what_a_client_knows_must_be_tensors(engine):
    @dataclass(frozen=True)
    class Arrays(LocalRule):
        def local(self, task, client):
            return {"counts": task.federation.class_counts[client]}

        def loss(self, net, batch, inputs):
            return super().loss(net, batch, inputs)

    with pytest.raises(SettingError, match=r"Arrays\.local must return tensors, got ndarray for 'counts'"):
        run(Arrays(), engine)
