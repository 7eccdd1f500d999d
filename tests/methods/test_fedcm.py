import pytest
import torch
from helpers import drive, federation, layout_of, simulate, small_net

from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg
from fedcat.methods.fedcm import FedCM
from fedcat.protocol.reply import Reply, Status

FED = federation([3, 9, 5, 12, 7, 4])
LAYOUT = layout_of(small_net())


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_alpha_1_it_is_fedavg_bit_for_bit(engine, dtype):
    layout = layout_of(small_net(), dtype)
    words = {"rounds": 4, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}
    plain = drive(simulate(FedAvg, FED, layout, engine, **words))
    led = drive(simulate(FedCM, FED, layout, engine, options={"alpha": 1.0}, **words))
    assert torch.equal(plain.method.row, led.method.row)


def answer(hop, own, samples=1, steps=2):
    """Reply as a client whose own steps are all alike: every step is the led mixture."""
    size = LAYOUT.parameter_size
    lead, sent = float(hop.sent["lead"]), hop.sent["step"]
    return Reply(hop.id, hop.start + steps * ((1 - lead) * own + lead * sent)[:size], samples=samples, steps=steps)


def test_equal_steps_add_up_to_themselves():
    """The mixture has a gain of one: after r rounds the direction is 1 - 0.9^r of the clients' own step."""
    method = simulate(FedCM, FED, LAYOUT, k=3).method
    own = torch.linspace(-1, 1, LAYOUT.size, dtype=torch.float64)
    for r in range(1, 30):
        before = method.row
        method.absorb([answer(hop, own, steps=2 + hop.client) for hop in method.plan(r)])
        assert torch.allclose(method.lead.step, (1 - 0.9**r) * own, atol=1e-14)
        assert not torch.equal(method.row, before)


def test_the_direction_is_the_mean_per_step_weighted_like_the_models():
    for weighting, share in (("samples", 0.9), ("equal", 0.5)):
        method = simulate(FedCM, FED, LAYOUT, k=2, options={"weighting": weighting}).method
        a, b = method.plan(1)
        method.absorb(
            [Reply(a.id, a.start + 6, samples=1, steps=3), Reply(b.id, b.start + 2, samples=9, steps=4)],
        )
        assert torch.allclose(method.lead.step, torch.full_like(method.lead.step, 2 * (1 - share) + 0.5 * share))


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("words", [{}, {"weight_decay": 0.1}, {"clip": 0.05}, {"clip": 0.05, "weight_decay": 0.1}])
def test_a_step_is_a_share_of_the_one_that_was_sent_and_of_the_clients_own(engine, words):
    """Also with weight decay and clipped gradients. One batch, so that a hop is one step."""
    fed = federation([4, 4])
    plain, led = (simulate(method, fed, LAYOUT, engine, k=2, rounds=2, epochs=1, **words) for method in (FedAvg, FedCM))
    sent = torch.linspace(-0.1, 0.1, LAYOUT.size, dtype=torch.float64)
    led.method.lead.step = sent
    jobs, own = led.plan(), plain.engine.train(plain.plan())
    for (_, hop), alone, mixed in zip(jobs, own, led.engine.train(jobs), strict=True):
        assert torch.allclose(mixed.end - hop.start, 0.1 * (alone.end - hop.start) + 0.9 * sent, atol=1e-14)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_an_engine_takes_such_steps(engine):
    """One client with one batch: its first step is -lr * 0.1 * g, and the direction is what it moved per step."""
    fed = federation([4, 4])
    plain, led = (
        simulate(method, fed, LAYOUT, engine, k=2, rounds=1, epochs=1, weight_decay=0.05) for method in (FedAvg, FedCM)
    )
    start = plain.method.row
    drive(plain)
    drive(led)
    assert torch.allclose(led.method.row - start, 0.1 * (plain.method.row - start), atol=1e-14)
    assert torch.allclose(led.method.lead.step, led.method.row - start, atol=1e-14)


def test_the_direction_follows_the_learning_rate():
    method = simulate(FedCM, FED, LAYOUT, k=2, rounds=4, lr=lambda r: (0.1, 0.1, 0.05, 0.05)[r]).method
    for r in range(2):
        method.absorb([answer(hop, torch.ones(LAYOUT.size, dtype=torch.float64)) for hop in method.plan(r + 1)])
    before = method.lead.step
    hops = method.plan(3)
    assert all(torch.equal(hop.sent["step"], before / 2) for hop in hops)
    method.absorb([Reply.lost(hop, Status.FAILED, "away") for hop in hops])
    assert all(torch.equal(hop.sent["step"], before / 2) for hop in method.plan(4))


def test_a_learning_rate_that_begins_at_zero():
    sim = drive(simulate(FedCM, FED, LAYOUT, k=3, rounds=4, lr=lambda r: 0.1 * r))
    assert sim.method.row.isfinite().all()
    assert sim.method.lead.lr == pytest.approx(0.3)


@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_a_share_outside_its_bounds_is_refused(alpha):
    with pytest.raises(SettingError, match="alpha must be"):
        simulate(FedCM, FED, LAYOUT, options={"alpha": alpha})
