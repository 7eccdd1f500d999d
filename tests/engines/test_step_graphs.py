"""Launches that are captured give what launches step by step give; they are split where memory ends."""

import gc
import time
from dataclasses import dataclass, replace
from weakref import ref

import numpy as np
import pytest
import torch
from helpers import DEVICES, apart, digits_net, drive, federation, layout_of, simulate, small_net
from torch import nn

from fedcat.core.errors import SettingError
from fedcat.data.federation import EvaluationSet
from fedcat.engines import StackedEngine
from fedcat.engines.batch_order import batch_lengths
from fedcat.engines.captured import SHARE
from fedcat.engines.evaluation import outputs_of, outputs_stacked
from fedcat.engines.rule_rows import largest
from fedcat.engines.step_graphs import FIRST, StepGraphs, widths
from fedcat.methods import FedAvg, FedCat, FedGen, FedProx, Scaffold
from fedcat.models.nets import Net
from fedcat.protocol.local_rule import LocalRule
from fedcat.runs.driver import Driver

DEVICE = DEVICES[-1]
SIZES = [3, 9, 5, 12, 7, 4]
LOCAL = {"momentum": 0.9, "weight_decay": 0.1, "clip": 0.5}


def trained(method, engine="stacked", exact=False, **words):
    make_net = digits_net if method is FedGen else small_net
    layout = layout_of(make_net(), torch.float64, DEVICE)
    sim = simulate(method, federation(SIZES), layout, engine, exact=exact, rounds=3, **LOCAL, **words)
    drive(sim)
    return sim


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("method", [FedAvg, FedProx, Scaffold, FedGen])
@pytest.mark.parametrize("lr_decay", [0.0, 0.1])
def test_captured_steps_agree_with_the_sequential_engine(method, exact, lr_decay, captured):
    a, b = (trained(method, engine, exact, lr_decay=lr_decay) for engine in ("sequential", "stacked"))
    assert apart(b.method.row, a.method.row) < 1e-10
    losses = [[record.train_loss for record in sim.history] for sim in (a, b)]
    assert np.allclose(*losses, rtol=1e-9)


def test_methods_with_different_rules_share_a_launch(captured, monkeypatch):
    counts = []
    run = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, launch: counts.append(len(launch.jobs)) or run(self, launch))
    layout, fed, engine = layout_of(small_net(), torch.float64, DEVICE), federation(SIZES), StackedEngine()
    methods = (Scaffold, FedAvg, FedProx, FedCat)
    together = [simulate(m, fed, layout, engine, rounds=2, seed=s, **LOCAL) for s, m in enumerate(methods)]
    drive(*together)
    assert counts == [12, 12]
    for seed, (method, sim) in enumerate(zip(methods, together, strict=True)):
        alone = simulate(method, fed, layout, "sequential", rounds=2, seed=seed, **LOCAL)
        drive(alone)
        assert apart(sim.method.row, alone.method.row) < 1e-10


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("variant", ["plain", "after-step"])
def test_what_follows_a_step_has_the_learning_rate_of_that_step(engine, variant, captured):
    """With constant gradients, SCAFFOLD's first control variate is the gradient, however lr decays."""
    fed, layout = federation([8] * 3), layout_of(small_net(), torch.float64, DEVICE)
    given = {"rounds": 1, "epochs": 4, "batch_size": 8, "lr": 1e-7, "lr_decay": 0.7, "options": {"variant": variant}}
    sim = drive(simulate(Scaffold, fed, layout, engine, **given))
    plain = drive(simulate(Scaffold, fed, layout, engine, **{**given, "lr_decay": 0.0}))
    assert apart(sim.method.control, plain.method.control) < 1e-5  # steps so small that gradients do not change
    assert sim.method.control.norm() > 0.1
    assert apart(sim.method.row, plain.method.row) > 1e-9


class Uploads(LocalRule):
    """Uploads the first parameter's logarithm, the number of steps, a flag, nothing, and something on the host."""

    def finish(self, start, end, steps, lr, momentum, sent, memory):
        first = end[:, :1]
        uploads = {"log": first.log(), "steps": steps.long(), "flag": first > 0, "none": end[:, :0]}
        return {**uploads, "host": torch.ones(len(end))}, {"kept": first}


@pytest.mark.parametrize("way", ["eager", "captured"])
def test_replies_say_whether_all_numbers_are_finite(way, request):
    if way == "captured":
        request.getfixturevalue("captured")
    sim = simulate(FedAvg, federation(SIZES), layout_of(small_net(), torch.float64, DEVICE), "stacked", k=5)
    task = replace(sim.task, rule=Uploads(), run="uploads")
    (_, hop), *_ = sim.plan()
    starts = [hop.start.clone() for _ in range(5)]
    for start, first in zip(starts[:2], (1.0, -1.0), strict=True):
        start[0] = first
    starts[2][1], starts[3][-1], starts[4][0] = torch.nan, torch.inf, 2.0
    jobs = [(task, replace(hop, copy=i, start=s, lr=0.0)) for i, s in enumerate(starts)]
    replies = sim.engine.train(jobs)
    assert [reply.finite for reply in replies] == [True, False, False, False, True]


def test_the_largest_magnitude_of_a_row_tells_whether_its_numbers_are_finite():
    rows = torch.tensor([[1.0, -3.0], [torch.nan, 2.0], [-torch.inf, 0.0]], dtype=torch.float64)
    right = torch.tensor([3.0, torch.nan, torch.inf], dtype=torch.float64)
    for given in (rows, rows.float()[:, :, None], torch.complex(torch.zeros_like(rows), rows)):
        assert torch.equal(largest(given).nan_to_num(-1), right.nan_to_num(-1))
    for given in (torch.ones(3, 2, dtype=torch.int64), torch.ones(3, 2) > 0, torch.ones(3, 0)):
        assert torch.equal(largest(given), torch.zeros(3, dtype=torch.float64))


def test_many_runs_train_as_two_halves_that_take_turns(captured, monkeypatch):
    """Each half has the same memory, and gives what its runs give alone."""
    monkeypatch.setattr("fedcat.engines.stacked.HALVED", 6)
    monkeypatch.setattr("fedcat.engines.captured.CapturedLaunches._fits", lambda self, *args: True)
    trained, made = [], []
    run, start = StepGraphs.run, StepGraphs.__init__
    who = lambda launch: sorted({task.run for task, _ in launch.jobs})  # noqa: E731
    monkeypatch.setattr(StepGraphs, "run", lambda self, launch: trained.append(who(launch)) or run(self, launch))
    monkeypatch.setattr(StepGraphs, "__init__", lambda self, *args: made.append(1) or start(self, *args))
    layout, fed, engine = layout_of(small_net(), torch.float64, DEVICE), federation([6] * 5), StackedEngine()
    words = {"k": 3, "momentum": 0.5}
    runs = [
        simulate(FedCat, fed, layout, engine, seed=s, rounds=3 + s // 3, run_name=f"{s}", **words) for s in range(4)
    ]
    drive(*runs)
    first, second = ["0", "1"], ["2", "3"]
    assert trained == [first, second, first, second, first, second, ["3"]]
    assert len(made) == 2
    for seed, together in enumerate(runs):
        alone = simulate(FedCat, fed, layout, "sequential", seed=seed, rounds=together.rounds, **words)
        drive(alone)
        assert apart(together.method.row, alone.method.row) < 1e-10
        assert [r.train_loss for r in together.history] == pytest.approx([r.train_loss for r in alone.history])


def test_hops_that_a_driver_left_behind_are_nobody_elses(captured, monkeypatch):
    """A driver is interrupted while the second half trains; the next one on the engine has runs of the same names."""
    monkeypatch.setattr("fedcat.engines.stacked.HALVED", 6)
    layout, fed, engine = layout_of(small_net(), torch.float64, DEVICE), federation([6] * 5), StackedEngine()

    def made(first):
        return [simulate(FedAvg, fed, layout, engine, seed=first + i, rounds=2, k=3, run_name=f"{i}") for i in range(2)]

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Driver(made(0)).run(interrupt)
    runs = made(5)
    drive(*runs)
    for i, run in enumerate(runs):
        alone = drive(simulate(FedAvg, fed, layout, "sequential", seed=5 + i, rounds=2, k=3))
        assert apart(run.method.row, alone.method.row) < 1e-10


def test_no_hop_is_late_for_want_of_a_turn(captured, monkeypatch):
    monkeypatch.setattr("fedcat.engines.stacked.HALVED", 6)
    run = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, launch: time.sleep(0.15) or run(self, launch))
    layout, fed, engine = layout_of(small_net(), torch.float64, DEVICE), federation([6] * 5), StackedEngine()
    runs = [simulate(FedAvg, fed, layout, engine, seed=s, rounds=2, k=3, run_name=f"{s}") for s in range(2)]
    Driver(runs, deadline=0.1).run()
    assert [len(record.lost) for run in runs for record in run.history] == [0, 0, 0, 0]


@dataclass(frozen=True)
class Remembers(LocalRule):
    """Looks at the net's features from a client's second visit on."""

    def loss(self, net, batch, inputs):
        found = super().loss(net, batch, inputs)
        if "seen" not in inputs.memory:
            return found
        return found + 0.1 * batch.mean(net.features(batch.x).square().mean(1))

    def finish(self, start, end, steps, lr, momentum, sent, memory):
        return {}, {"seen": torch.ones(len(end), 1).to(end)}


class WithMemory(FedAvg):
    rule = Remembers()

    def __init__(self, context):
        super().__init__(context)
        self.kept = {}

    def hop(self, round, slot, client, visit):
        return replace(super().hop(round, slot, client, visit), memory=self.kept.get(client, {}))

    def reduce(self, hops, replies):
        self.kept |= {hop.client: reply.memory for hop, reply in zip(hops, replies, strict=True)}
        return super().reduce(hops, replies)


@dataclass(frozen=True)
class DrawsLater(LocalRule):
    """Draws nothing in the first round, then other numbers in each."""

    def draw(self, rng, task, hop, steps):
        return {"z": torch.from_numpy(rng.random(steps))} if hop.round else {}

    def loss(self, net, batch, inputs):
        found = super().loss(net, batch, inputs)
        return found * (1 + inputs.drawn["z"]) if "z" in inputs.drawn else found


class WithDraws(FedAvg):
    rule = DrawsLater()


@pytest.mark.parametrize("method", [WithMemory, WithDraws])
def test_rules_that_change_with_what_hops_bring(method, captured):
    rows = []
    for engine in ("sequential", "stacked"):
        layout = layout_of(linear_net(), torch.float64, DEVICE)
        sim = simulate(method, federation([3, 9, 5]), layout, engine, rounds=3, k=2, epochs=1)
        drive(sim)
        rows.append(sim.method.row)
    assert apart(*rows) < 1e-10


def test_launches_of_one_form_use_the_same_memory(captured, monkeypatch):
    made = []
    start = StepGraphs.__init__
    monkeypatch.setattr(StepGraphs, "__init__", lambda self, *args: made.append(1) or start(self, *args))
    layout, fed, engine = layout_of(small_net(), torch.float64, DEVICE), federation([6] * 5), StackedEngine()
    monkeypatch.setattr("fedcat.engines.captured.CapturedLaunches._fits", lambda self, *args: True)
    sim = simulate(FedAvg, fed, layout, engine, rounds=5)
    drive(sim)
    before = len(made)
    sim = simulate(FedProx, fed, layout, engine, rounds=2)
    drive(sim)
    assert len(made) == before + 1
    engine.release()
    sim = simulate(FedProx, fed, layout, engine, rounds=1)
    drive(sim)
    assert len(made) == before + 2


def test_rounds_with_other_longest_hops_use_the_same_memory(captured, monkeypatch):
    made = []
    start = StepGraphs.__init__
    monkeypatch.setattr(StepGraphs, "__init__", lambda self, *args: made.append(1) or start(self, *args))
    monkeypatch.setattr("fedcat.engines.captured.CapturedLaunches._fits", lambda self, *args: True)
    layout, fed, engine = (
        layout_of(small_net(), torch.float64, DEVICE),
        federation([3, 9, 5, 12, 7, 20]),
        StackedEngine(),
    )
    sims = [simulate(FedProx, fed, layout, engine, rounds=12, k=2, seed=s, options={"mu": 0.1 + s}) for s in range(4)]
    drive(*sims)
    assert len(made) == 1
    for seed, sim in enumerate(sims):
        alone = simulate(FedProx, fed, layout, "sequential", rounds=12, k=2, seed=seed, options={"mu": 0.1 + seed})
        drive(alone)
        assert apart(sim.method.row, alone.method.row) < 1e-10


def test_room_for_longer_hops_has_a_limit(captured, monkeypatch):
    rooms = []
    run = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, launch: rooms.append(self.room) or run(self, launch))
    layout, fed = layout_of(small_net(), torch.float64, DEVICE), federation([4, 4, 4, 400])
    sim = simulate(FedAvg, fed, layout, StackedEngine(), rounds=4, k=2, batch_size=4, epochs=1, seed=1)
    drive(sim)
    longest = [max(sim.task.samples(d) // 4 for d in record.clients) for record in sim.history]
    assert set(longest) == {1, 100}
    assert set(zip(longest, rooms, strict=True)) == {(1, 8), (100, 128)}


def linear_net():
    """Make a small net with kernels, which Triton's interpreter runs in no time."""
    torch.manual_seed(0)
    return Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()), nn.Linear(16, 10))


def test_memory_that_is_dropped_is_free_at_once(captured):
    layout, engine = layout_of(linear_net(), torch.float32, DEVICE), StackedEngine()
    drive(simulate(FedAvg, federation([4, 4, 4]), layout, engine, rounds=1, k=2))
    (graphs,) = engine._captured._graphs.values()
    assert hasattr(graphs.gradients, "layers")
    rows = ref(graphs.buffers.p)
    gc.disable()
    try:
        del graphs
        engine._captured._graphs.clear()
        assert rows() is None
    finally:
        gc.enable()


def test_other_memory_is_dropped_before_a_launch_is_given_up(captured, monkeypatch):
    engine = StackedEngine(exact=True)
    start = StepGraphs.__init__

    def limited(self, *args):
        if engine._captured._graphs:
            raise torch.OutOfMemoryError("room for one graphs only")
        start(self, *args)

    monkeypatch.setattr(StepGraphs, "__init__", limited)
    monkeypatch.setattr("fedcat.engines.captured.CapturedLaunches._fits", lambda self, *args: True)
    layout, fed = layout_of(small_net(), torch.float64, DEVICE), federation([4] * 3)
    for epochs in (1, 5):
        sim = simulate(FedAvg, fed, layout, engine, rounds=1, epochs=epochs, exact=True)
        drive(sim)
        assert sim.done


def test_kernels_are_named_by_loss(captured):
    layout, fed, engine = layout_of(linear_net(), torch.float32, DEVICE), federation([3, 9, 5]), StackedEngine()
    sims = [simulate(method, fed, layout, engine, rounds=1, k=2, epochs=1) for method in (FedAvg, FedGen)]
    drive(*sims)
    assert [engine.kernels(sim.task) for sim in sims] == [
        "fused",
        "fused, loss by autograd",
    ]


@dataclass(frozen=True)
class Both(LocalRule):
    """A loss and a gradient of its own, both of which look at the start."""

    def loss(self, net, batch, beside):
        near = batch.mean((net.logits(batch.x) - net.at(beside.start).logits(batch.x)).square().mean(1))
        return super().loss(net, batch, beside) + 0.1 * near

    def gradient(self, g, p, start, sent, memory):
        return g + 0.5 * (p - start)


class WithBoth(FedAvg):
    rule = Both()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("method", [FedAvg, FedProx, Scaffold, FedGen, WithBoth])
def test_memory_that_is_used_again_holds_nothing_of_the_last_launch(method, exact, captured, monkeypatch):
    graphs = []
    run = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, launch: graphs.append(self) or run(self, launch))
    make_net = digits_net if method is FedGen else small_net
    layout, fed = layout_of(make_net(), torch.float64, DEVICE), federation([7, 3, 3, 7, 7])
    engine = StackedEngine(exact)
    for seed, clip in ((1, None), (2, 0.05), (3, None)):
        rows = []
        for used in ("sequential", engine):
            words = {"rounds": 3, "k": 3, "seed": seed, "clip": clip, "momentum": 0.9, "batch_size": 4}
            sim = simulate(method, fed, layout, used, exact=exact, **words)
            drive(sim)
            rows.append(sim.method.row)
        assert apart(rows[1], rows[0]) < 1e-10
    assert len(set(graphs)) < len(graphs) / 2


def test_rules_that_draw_by_batch_size_train_with_several(captured):
    """All clients have fewer samples than a batch, so that batches are padded alike."""
    layout, fed, engine = layout_of(digits_net(), torch.float64, DEVICE), federation([5] * 4), StackedEngine()
    words = {"rounds": 2, "options": {"hidden": 8, "generator_steps": 2}}
    together = [simulate(FedGen, fed, layout, engine, batch_size=size, run_name=f"{size}", **words) for size in (6, 9)]
    drive(*together)
    for size, sim in zip((6, 9), together, strict=True):
        alone = simulate(FedGen, fed, layout, "sequential", batch_size=size, **words)
        drive(alone)
        assert apart(sim.method.row, alone.method.row) < 1e-10


@pytest.mark.parametrize("way", ["eager", "captured"])
@pytest.mark.parametrize(
    ("odd", "message"),
    [({"a": (4,)}, r"the same names .* \[\('a',\), \('a', 'b'\)\]"), ({"a": (1,), "b": ()}, r"'a' in the same shape")],
)
def test_what_clients_draw_must_be_alike_in_every_round(odd, message, way, request):
    if way == "captured":
        request.getfixturevalue("captured")

    @dataclass(frozen=True)
    class Draws(LocalRule):
        def draw(self, rng, task, hop, steps):
            shapes = odd if hop.round and hop.client % 2 else {"a": (4,), "b": ()}
            return {name: torch.ones(steps, *shape) for name, shape in shapes.items()}

        def loss(self, net, batch, inputs):
            return super().loss(net, batch, inputs) * (1 + inputs.drawn["a"].sum())

    class Drawing(FedAvg):
        rule = Draws()

    sim = simulate(Drawing, federation([8] * 6), layout_of(small_net(), torch.float64, DEVICE), "stacked", k=6)
    with pytest.raises(SettingError, match=message):
        drive(sim)
    assert len(sim.history) == 1


def test_rows_of_very_different_batches_do_not_share_a_launch(captured, monkeypatch):
    batches = []
    run = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, launch: batches.append(launch.batch) or run(self, launch))
    layout, fed, engine = layout_of(small_net(), torch.float64, DEVICE), federation([40] * 4), StackedEngine()
    together = [simulate(FedAvg, fed, layout, engine, rounds=1, batch_size=size) for size in (4, 5, 40)]
    drive(*together)
    assert batches == [5, 40]
    for size, sim in zip((4, 5, 40), together, strict=True):
        alone = simulate(FedAvg, fed, layout, "sequential", rounds=1, batch_size=size)
        drive(alone)
        assert apart(sim.method.row, alone.method.row) < 1e-10


def test_a_lone_sample_that_joins_a_batch_has_room(captured):
    a, b = (trained(FedAvg, engine, join_lone=True) for engine in ("sequential", "stacked"))
    assert apart(b.method.row, a.method.row) < 1e-10


@pytest.mark.parametrize("join_lone", [False, True])
def test_batches_that_are_drawn_while_the_device_is_at_work(captured, join_lone):
    a, b = (trained(FedAvg, engine, epochs=12, k=6, join_lone=join_lone) for engine in ("sequential", "stacked"))
    assert 12 * len(batch_lengths(3, 4)) < FIRST < 12 * len(batch_lengths(12, 4))
    assert apart(b.method.row, a.method.row) < 1e-10


def test_launches_that_do_not_fit_are_split(captured, monkeypatch):
    tried = []
    run = StepGraphs.run

    def small(self, launch):
        tried.append(len(launch.jobs))
        if len(launch.jobs) > 2:
            raise torch.OutOfMemoryError("too much")
        return run(self, launch)

    whole = trained(FedCat, k=5)
    monkeypatch.setattr(StepGraphs, "run", small)
    split = trained(FedCat, k=5)
    assert tried[:5] == [5, 2, 2, 1, 2]
    assert set(tried[5:]) == {1, 2}
    assert apart(split.method.row, whole.method.row) < 1e-10
    monkeypatch.setattr(StepGraphs, "run", lambda self, launch: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(torch.OutOfMemoryError):
        trained(FedCat, k=5)


def test_memory_that_ends_splits_launches_before_it_runs_out(captured, monkeypatch):
    """There is room for three rows, then for two: another process has taken some."""
    kept, room = [], [3]
    run = StepGraphs.run
    layout, fed, engine = layout_of(small_net(), torch.float64, DEVICE), federation([4, 4, 4, 9, 9, 9]), StackedEngine()
    mine = engine._captured

    def held():
        return sum(graphs.count for graphs in mine._graphs.values())

    monkeypatch.setattr(mine, "_measure", lambda *given: SHARE)
    monkeypatch.setattr(mine, "_free", lambda *given: room[0] - held())
    monkeypatch.setattr(StepGraphs, "run", lambda self, launch: kept.append(held()) or run(self, launch))
    whole = simulate(FedAvg, fed, layout, "sequential", rounds=3, k=6)
    drive(whole)
    sim = simulate(FedAvg, fed, layout, engine, rounds=2, k=6)
    drive(sim)
    assert kept == [3, 3, 3, 3]
    engine.release()
    room[0] = 2
    sim = simulate(FedAvg, fed, layout, engine, rounds=3, k=6)
    drive(sim)
    assert set(kept[4:]) == {2}
    assert apart(sim.method.row, whole.method.row) < 1e-10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_cap_on_memory_splits_launches_and_changes_nothing(monkeypatch):
    counts = []
    run = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, launch: counts.append(len(launch.jobs)) or run(self, launch))
    free = trained(FedCat, StackedEngine(), k=5)
    with pytest.warns(UserWarning, match="memory 1e-09 GB is too small"):
        capped = trained(FedCat, StackedEngine(memory=1.0), k=5)
    assert max(counts[:3]) == 5
    assert max(counts[3:]) == 1
    assert apart(capped.method.row, free.method.row) < 1e-10


def test_widths_for_which_there_are_graphs():
    assert widths(10) == [10, 5, 3, 2, 1]
    assert widths(1) == [1]


def test_many_rows_are_evaluated_in_one_pass():
    fed = federation(SIZES)
    layout = layout_of(digits_net(), torch.float64, DEVICE)
    pool = fed.test.to(layout.device)
    torch.manual_seed(0)
    row = layout.pack(layout.net)
    rows = [row * (0.5 + torch.rand(len(row)).to(row)) for _ in range(5)]
    for index in (None, np.array([1, 4, 2])):
        on = EvaluationSet(pool, index)
        many = list(outputs_stacked(layout, rows, on))
        for outputs, row in zip(many, rows, strict=True):
            assert torch.allclose(outputs, outputs_of(layout, row, on), rtol=1e-12)
    assert len({float(outputs.sum()) for outputs in many}) == 5
