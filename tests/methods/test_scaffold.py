import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import drive, federation, layout_of, simulate, small_net, step
from torch import nn

from fedcat.core.errors import SettingError
from fedcat.data.federation import Federation
from fedcat.data.pool import Pool
from fedcat.methods import FedAvg
from fedcat.methods.base import Context
from fedcat.methods.scaffold import ControlVariateRule, Scaffold, amplification
from fedcat.protocol.reply import Reply, Status

FED = federation([3, 9, 5, 12, 7, 4])


@pytest.mark.parametrize(
    ("momentum", "steps", "wanted"), [(0.9, 50, 8.2), (0.5, 50, 1.96), (0.0, 7, 1.0), (0.9, 1, 1.0)]
)
def test_how_much_momentum_lengthens_the_way(momentum, steps, wanted):
    v = way = 0.0
    for _ in range(steps):
        v = momentum * v + 1.0
        way += v
    columns = [torch.tensor([[value]], dtype=torch.float64) for value in (momentum, steps)]
    found = float(amplification(*columns))
    assert found == pytest.approx(way / steps, rel=1e-12)
    assert found == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize("variant", ["corrected", "after-step", "plain"])
@pytest.mark.parametrize("weighting", ["equal", "samples"])
@pytest.mark.parametrize("k", [6, 3])
def test_the_servers_control_variate_is_the_mean_of_the_clients(variant, weighting, k):
    """Under full participation, and under partial as well, clients that never took part counting as zero."""
    layout = layout_of(small_net())
    options = {"variant": variant, "weighting": weighting}
    sim = simulate(Scaffold, FED, layout, "stacked", k=k, rounds=5, lr=0.02, momentum=0.5, options=options)
    drive(sim)
    method = sim.method
    shares = FED.sizes / FED.sizes.sum() if weighting == "samples" else np.full(6, 1 / 6)
    mean = sum(share * method.memory[client]["control"] for client, share in enumerate(shares))
    assert method.control.norm() > 1e-3
    assert torch.allclose(mean, method.control, atol=1e-14)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("variant", ["corrected", "after-step", "plain"])
def test_the_first_round_with_sample_weighting_is_fedavgs(engine, variant):
    layout = layout_of(small_net(), torch.float32)
    words = {"rounds": 1, "momentum": 0.5, "clip": 1.0}
    first = simulate(Scaffold, FED, layout, engine, options={"variant": variant, "weighting": "samples"}, **words)
    plain = simulate(FedAvg, FED, layout, engine, **words)
    drive(first)
    drive(plain)
    assert torch.equal(first.method.row, plain.method.row)


def test_without_momentum_the_printed_form_and_the_corrected_one_are_the_same():
    layout = layout_of(small_net())
    rows = []
    for variant in ("plain", "corrected", "after-step"):
        sim = simulate(Scaffold, FED, layout, rounds=4, momentum=0.0, options={"variant": variant})
        drive(sim)
        rows.append(sim.method.row)
    assert torch.allclose(rows[0], rows[1], atol=1e-14)
    assert torch.allclose(rows[0], rows[2], atol=1e-12)


def test_a_round_by_hand():
    """Option II on one client of two, plain SGD: y -= lr (g - c_i + c); c_i+ = c_i - c + (x - y) / (steps lr)."""
    rule = ControlVariateRule("plain")
    start, end = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.4, 2.6]])
    sent, memory = {"control": torch.tensor([[0.1, -0.2]])}, {"control": torch.tensor([[0.5, 0.3]])}
    column = [torch.tensor([[v]]) for v in (3.0, 0.2, 0.0)]
    g = rule.gradient(torch.tensor([[1.0, 1.0]]), start, start, sent, memory)
    assert torch.allclose(g, torch.tensor([[1.0 - 0.5 + 0.1, 1.0 - 0.3 - 0.2]]))
    uploads, kept = rule.finish(start, end, *column, sent, memory)
    wanted = torch.tensor([[0.5 - 0.1 + 0.6 / 0.6, 0.3 + 0.2 - 0.6 / 0.6]])
    assert torch.allclose(kept["control"], wanted)
    assert torch.allclose(uploads["control"], wanted - memory["control"])


class Point(nn.Module):
    """One parameter w; its "logits" for the input b are w - b."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.w - x


@dataclass(frozen=True)
class Quadratic(ControlVariateRule):
    """f_i(w) = (w - b_i)^2 / 2."""

    def loss(self, net, batch, beside):
        return batch.mean(net.logits(batch.x)[:, 0] ** 2 / 2)


@functools.cache
def on_quadratics(variant, momentum, rounds=32, sizes=(1, 2, 3, 4), lr=0.002):
    """Return the errors |w - mean of b_i| after each round; all four clients take part, with 20 steps per sample."""
    b = np.array([-3.0, 0.5, 1.0, 7.0])
    owner = np.repeat(np.arange(4), sizes)
    pool = Pool(b[owner][:, None], np.zeros(len(owner), int))
    fed = Federation(pool, pool, owner, 2, 4)

    class OnQuadratics(Scaffold):
        def __init__(self, context: Context):
            super().__init__(context, variant=variant)
            self.rule = Quadratic(variant)

    sim = simulate(
        OnQuadratics,
        fed,
        layout_of(Point()),
        "stacked",
        rounds=rounds,
        k=4,
        epochs=20,
        batch_size=1,
        lr=lr,
        momentum=momentum,
    )
    errors = []
    while not sim.done and (not errors or errors[-1] < 1e6):
        step(sim)
        errors.append(abs(float(sim.method.row[0]) - b.mean()))
    return errors


def test_on_quadratics_with_momentum_the_default_converges_and_the_printed_form_diverges(record_figure):
    found = {variant: on_quadratics(variant, 0.9, rounds=25)[-1] for variant in ("corrected", "after-step", "plain")}
    for variant, limit in (("corrected", 1e-9), ("after-step", 0.5), ("plain", float("inf"))):
        record_figure(f"SCAFFOLD on quadratics, momentum 0.9, {variant}: error", found[variant], limit)
    assert found["corrected"] < 1e-9
    assert found["plain"] > 1e6
    assert on_quadratics("plain", 0.0, lr=0.02)[-1] < 1e-9


def test_the_correction_after_the_step_is_stable_and_exact_only_where_clients_take_as_many_steps():
    assert on_quadratics("after-step", 0.9, sizes=(2, 2, 2, 2))[-1] < 1e-9
    assert 0.4 < on_quadratics("after-step", 0.9, rounds=25)[-1] < 0.5


def test_a_client_that_is_drawn_twice_counts_once_in_the_control_variate():
    class Twice(Scaffold):
        def select(self, round):
            first, second, _ = super().select(round)
            return [first, second, first]

    sim = simulate(Twice, FED, layout_of(small_net()), rounds=4, momentum=0.5, lr=0.02)
    drive(sim)
    mean = sum(sim.method.memory[client]["control"] for client in range(6)) / 6
    assert torch.allclose(mean, sim.method.control, atol=1e-14)


def test_only_clients_that_took_part_have_a_control_variate():
    """100,000 clients and a row of 1,000: all of them would take 400 MB."""
    layout = layout_of(nn.Linear(99, 10), torch.float32)
    samples = np.ones(100_000, np.int64)
    start = layout.pack(layout.net)
    method = Scaffold(Context(0, layout, start, samples, 20, 1, lambda round: 0.1))
    took_part = set()
    for _ in range(5):
        hops = method.plan(5)
        took_part |= {hop.client for hop in hops}
        ones = {"control": torch.ones(1000)}
        method.absorb(
            [
                Reply(h.id, h.start + 1, 1, 1, uploads=ones, memory=ones)
                if h.copy
                else Reply.lost(h, Status.FAILED, "")
                for h in hops
            ]
        )
    state = method.state()
    assert len(method.memory) == len(state["memory"]) <= len(took_part) <= 100
    assert sum(t.numel() for memory in state["memory"].values() for t in memory.values()) <= 100 * 1000
    assert torch.allclose(method.control, torch.full((1000,), 5 * 19 / 100_000))


def test_a_step_size_of_zero_teaches_nothing():
    """A schedule may end at 0: there is no way from which a gradient could be read."""
    sim = simulate(Scaffold, FED, layout_of(small_net()), rounds=2, lr=0.0, momentum=0.5)
    drive(sim)
    assert not any(record.lost for record in sim.history)
    assert not sim.method.control.any()


def test_in_exact_mode_the_control_variates_are_the_same_in_any_company():
    """Powers are computed otherwise in wide vectors: 0.87**8 in float64 is one such number."""
    fed = federation([16] * 10)
    layout = layout_of(small_net())

    def made(seed, engine):
        return simulate(
            Scaffold, fed, layout, engine, k=5, rounds=3, seed=seed, momentum=0.87, exact=True, epochs=2, lr=0.02
        )

    alone = made(0, "stacked")
    drive(alone)
    together = [made(seed, alone.engine) for seed in range(8)]
    drive(*together)
    assert torch.equal(together[0].method.control, alone.method.control)
    assert torch.equal(together[0].method.row, alone.method.row)


@pytest.mark.parametrize(("options", "message"), [({"variant": "x"}, "variant"), ({"weighting": "x"}, "weighting")])
def test_unknown_variants_are_refused(options, message):
    with pytest.raises(SettingError, match=message):
        simulate(Scaffold, FED, layout_of(small_net()), options=options)


def test_hops_bring_the_servers_control_variate_and_the_clients_own():
    sim = simulate(Scaffold, FED, layout_of(small_net()), rounds=3, momentum=0.5, lr=0.02, k=6)
    size = sim.task.layout.parameter_size
    first = sim.method.plan(1)
    for hop in first:
        assert hop.sent["control"].tolist() == hop.memory["control"].tolist() == [0.0] * size
    sim.method.absorb(
        [
            Reply(
                hop.id,
                hop.start,
                samples=1,
                steps=1,
                uploads={"control": torch.full((size,), hop.client + 1.0).double()},
                memory={"control": torch.full((size,), 10.0 + hop.client).double()},
            )
            for hop in first
        ]
    )
    for hop in sim.method.plan(2):
        assert hop.sent["control"].tolist() == pytest.approx([21 / 6] * size)
        assert hop.memory["control"].tolist() == [10.0 + hop.client] * size


def test_a_client_whose_reply_is_lost_keeps_what_it_had():
    sim = simulate(Scaffold, FED, layout_of(small_net()), rounds=3, k=6, lr=0.02)
    step(sim)
    before = {client: sim.method.memory[client]["control"] for client in range(6)}
    jobs = sim.plan()
    replies = sim.engine.train(jobs)
    gone = jobs[2][1]
    replies[2] = Reply.lost(gone, Status.FAILED, "away")
    sim.absorb(replies)
    for client, control in before.items():
        assert torch.equal(sim.method.memory[client]["control"], control) == (client == gone.client)
    mean = sum(sim.method.memory[client]["control"] for client in range(6)) / 6
    assert torch.allclose(mean, sim.method.control, atol=1e-14)
