import json

import pytest
import torch
from helpers import (
    drive,
    federation,
    layout_of,
    simulate,
    small_net,
    step,
)

import fedcat
from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg, FedCat
from fedcat.methods.average import RunningAverage, weighted_mean
from fedcat.methods.fedcluster import FedCluster
from fedcat.methods.server_optimizer import Mean

FED = federation([3, 9, 5, 12, 7, 4])
SHORT = {"dataset": "digits", "rounds": 5, "epochs": 1, "evaluate_every": 1, "clients": 12, "per_round": 3}


def test_the_weights_fall_by_the_decay_and_add_up_to_one():
    rows = torch.eye(4).double()
    average = RunningAverage(0.8)
    for row in rows:
        average.add(row)
    weights = torch.tensor([0.8**3, 0.8**2, 0.8, 1.0]).double()
    assert torch.allclose(average.row, weights / weights.sum(), atol=1e-15)
    first = RunningAverage(0.95)
    first.add(rows[1])
    assert torch.equal(first.row, rows[1])


def weights_of(memory, rounds):
    average = RunningAverage(memory)
    for row in torch.eye(rounds).double():
        average.add(row)
    return average.row


@pytest.mark.parametrize("power", [1.0, 4.0])
def test_from_one_on_the_weights_grow_with_a_power_of_the_round(power):
    weights = weights_of(power, 3000)
    assert (weights[2999] / weights[1499]).item() == pytest.approx(2**power, rel=0.05 * power)
    mean = (weights * torch.arange(3000)).sum().item()
    assert (3000 - mean) / 3000 == pytest.approx(1 / (power + 2), rel=0.1)


def test_at_first_an_average_with_a_power_follows_the_model_closely():
    assert weights_of(4.0, 18)[-1] == 1
    assert weights_of(4.0, 50)[-1].item() == pytest.approx(2 * 5 / 50)
    assert weights_of(4.0, 500)[-1].item() == pytest.approx(1.1 * 5 / 500)


@pytest.mark.parametrize("memory", [0.8, 3.0])
def test_an_average_goes_on_from_its_state(memory):
    rows = torch.randn(26, 3).double()
    whole, first, second = (RunningAverage(memory) for _ in range(3))
    assert first.state() == {"rounds": 0, "row": None}
    for row in rows:
        whole.add(row)
    for row in rows[:23]:
        first.add(row)
    second.restore(first.state())
    assert second.rounds == 23
    for row in rows[23:]:
        second.add(row)
    assert torch.equal(second.row, whole.row)


def test_a_decay_of_zero_keeps_the_last_round_only():
    average = RunningAverage(0.0)
    for row in torch.eye(3).double():
        average.add(row)
    assert average.row.tolist() == [0.0, 0.0, 1.0]


def test_weights_need_not_add_up_to_one_and_may_be_large():
    rows = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    for scale in (1e-3, 1.0, 1e9):
        assert weighted_mean(rows, [scale, 0, 3 * scale]).item() == pytest.approx(3.25, rel=1e-12)
    assert weighted_mean(rows, [0, 0, 5]).item() == 4.0
    assert weighted_mean(rows.float(), [1, 1, 2]).dtype == torch.float32


def test_fedcats_average_is_of_the_copies_mean_after_every_round():
    layout = layout_of(small_net())
    sim = simulate(FedCat, FED, layout, rounds=7, k=3, average=0.9)
    wanted = RunningAverage(0.9)
    while not sim.done:
        jobs = sim.plan()
        replies = sim.engine.train(jobs)
        before, seen = list(sim.method.copies), list(sim.method.seen)
        for (_, hop), reply in zip(jobs, replies, strict=True):
            before[hop.copy], seen[hop.copy] = reply.end, seen[hop.copy] + reply.samples
        wanted.add(weighted_mean(torch.stack(before), seen))
        sim.absorb(replies)
        sim.record({})
    assert torch.allclose(sim.method.models()["average"], wanted.row, atol=1e-14)
    assert not torch.allclose(wanted.row, sim.method.row)


@pytest.mark.parametrize("method", [FedAvg, FedCat])
def test_an_average_changes_nothing_else(method):
    layout = layout_of(small_net())
    with_it, without = (simulate(method, FED, layout, rounds=6, average=a) for a in (0.9, None))
    drive(with_it)
    drive(without)
    assert torch.equal(with_it.method.row, without.method.row)
    assert (with_it.ledger.up, with_it.ledger.down) == (without.ledger.up, without.ledger.down)
    assert with_it.history[-1].accuracy == without.history[-1].accuracy
    assert set(with_it.history[-1].others) == {"average"}


@pytest.mark.parametrize("clusters", [1, 2])
def test_other_methods_average_the_row_after_every_round(clusters):
    layout = layout_of(small_net())
    sim = simulate(FedCluster, FED, layout, rounds=4, k=4, average=0.7, options={"clusters": clusters})
    rows = []
    while not sim.done:
        if step(sim):
            rows.append(sim.method.row)
    weights = torch.tensor([0.7**age for age in (3, 2, 1, 0)]).double()
    assert torch.allclose(sim.method.models()["average"], weights @ torch.stack(rows) / weights.sum(), atol=1e-14)


def test_at_the_end_of_a_cycle_the_stepped_row_enters_the_average():
    sim = simulate(FedCat, FED, layout_of(small_net()), rounds=3, k=3, average=0.0, server_optimizer=Mean(0.5))
    drive(sim)
    start = sim.task.layout.pack(sim.task.layout.net)
    assert torch.allclose(sim.method.models()["average"], sim.method.row, atol=1e-12)
    assert not torch.allclose(sim.method.row, start, atol=1e-4)


def test_before_the_first_round_the_average_is_the_start():
    sim = simulate(FedCat, FED, layout_of(small_net()), average=0.9)
    assert torch.equal(sim.method.models()["average"], sim.method.models()["global"])


def test_a_run_evaluates_keeps_and_gives_back_the_average(tmp_path):
    result = fedcat.run(method="fedcat", average=0.5, out=tmp_path / "run", **SHORT)
    scores = [record.others["average"]["accuracy"] for record in result.history]
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    assert summary["metrics"]["average"]["accuracy"]["best"] == max(scores)
    assert summary["metrics"]["average"]["accuracy"]["final"] == scores[-1]
    stored = fedcat.load_model(tmp_path / "run", model="average").state_dict()
    kept = result.model("average").state_dict()
    assert all(torch.equal(stored[name], kept[name]) for name in kept)
    usual = fedcat.load_model(tmp_path / "run").state_dict()
    assert any(not torch.equal(stored[name], usual[name]) for name in kept)


def test_a_comparison_has_the_average_in_its_lines(tmp_path):
    lines = fedcat.compare(["fedavg", "fedcat"], seeds=2, average=0.5, out=tmp_path / "c", **SHORT)
    stored = json.loads((tmp_path / "c" / "comparison.json").read_text())
    for line, kept in zip(lines, stored, strict=True):
        assert line.others == ["average"]
        best = [max(r.others["average"]["accuracy"] for r in result.history) for result in line.results]
        assert line.mean_std("best", "average")[0] == pytest.approx(sum(best) / 2)
        assert kept["others"]["average"]["best"]["mean"] == line.mean_std("best", "average")[0]
        assert kept["relative_traffic"] == pytest.approx(1.0)


def test_a_method_may_have_an_average_of_its_own():
    lines = fedcat.compare(["fedavg", "fedcat"], options={"fedcat": {"average": 2}}, **SHORT)
    assert [line.others for line in lines] == [[], ["average"]]
    assert lines[1].results[0].settings.average == 2


class Stubborn(fedcat.Method):
    """A method that knows nothing of averages."""

    def __init__(self, context):
        super().__init__(context)
        self.row = context.start

    def plan(self, until):
        return []

    def absorb(self, replies):
        pass

    def models(self, *wanted):
        return {"global": self.row}

    def state(self):
        return {}

    def restore(self, state):
        pass


def test_what_a_method_does_not_keep_cannot_be_asked_for(tmp_path):
    with pytest.raises(SettingError, match="average cannot be set: the method 'test_average:Stubborn'"):
        fedcat.run(method=Stubborn, average=0.5, **SHORT)
    with pytest.raises(SettingError, match="server_lr cannot be set: the method Stubborn"):
        fedcat.run(method=Stubborn, server_lr=0.5, **SHORT)
    result = fedcat.run(method="fedavg", out=tmp_path / "run", **SHORT)
    with pytest.raises(SettingError, match="unknown model 'average'"):
        result.model("average")
    with pytest.raises(SettingError, match="unknown model 'average': available: global"):
        fedcat.load_model(tmp_path / "run", model="average")
