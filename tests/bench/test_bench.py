"""The bench does the same work in the loop and in the engines, and says so; how fast is not for a test."""

import json

import pytest
import torch
from typer.testing import CliRunner

from fedcat.bench.measure import PASSES, Bench, Case, matrix_rate
from fedcat.bench.plain_loop import PlainLoop
from fedcat.bench.workload import IMAGES, Workload
from fedcat.cli.app import app
from fedcat.core.errors import SettingError
from fedcat.models.nets import NETS
from fedcat.runs.driver import Driver

CPU = torch.device("cpu")
SMALL = Workload("digits-cnn", per_round=3, clients=6, epochs=2, samples=120)


def test_every_net_of_the_package_has_images():
    assert set(IMAGES) == {name for name, _ in NETS} - {"mlp", "cnn", "char-lstm"}
    with pytest.raises(SettingError, match="unknown net"):
        Workload("no-such").dataset()


@pytest.mark.parametrize("loader", [False, True])
def test_the_loop_takes_the_steps_of_the_simulation(loader, monkeypatch):
    steps = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *a, **k: steps.append(1) or step(self, *a, **k))
    data = SMALL.dataset()
    (sim,) = SMALL.runs(1, data, engine="stacked")
    Driver([sim]).step()
    clients = sim.history[0].clients
    loop = PlainLoop(SMALL, sim, loader)
    before = {name: value.clone() for name, value in loop.state.items()}
    loop.prepare(clients)
    loop.round(clients)
    assert len(steps) == SMALL.steps(sim, clients)
    assert sum(len(loop.clients[d][1]) for d in clients) == sum(sim.task.samples(d) for d in clients)
    assert all((loop.state[name] != before[name]).any() for name in before)


def test_the_loop_averages_by_samples():
    data = SMALL.dataset()
    (sim,) = SMALL.runs(1, data, engine="sequential")
    loop = PlainLoop(SMALL, sim)
    loop.prepare([0, 1])
    start, ends = loop.state, []
    for client in (0, 1):
        torch.manual_seed(client)
        loop.state = start
        loop.round([client])
        ends.append(loop.state)
    seeds = iter((0, 1))
    train = loop._train
    loop._train = lambda x, y: (torch.manual_seed(next(seeds)), train(x, y))
    loop.state = start
    loop.round([0, 1])
    sizes = [len(loop.clients[d][1]) for d in (0, 1)]
    for name, value in loop.state.items():
        expected = sum(size * end[name] for size, end in zip(sizes, ends, strict=True)) / sum(sizes)
        assert torch.allclose(value, expected, atol=1e-6)


def test_what_is_measured_belongs_together():
    bench = Bench(SMALL, CPU, turns=2)
    timing = bench.time(Case("stacked", runs=2))
    assert timing.engine == "stacked"
    assert timing.seconds > 0
    assert timing.start > 0
    assert timing.ratio > 0
    assert timing.rate == pytest.approx(bench.flops / timing.step)
    assert timing.share == pytest.approx(timing.rate / bench.rate("fp32"))
    per_sample = 2 * (64 * 9 * 16 + 16 * 16 * 9 * 32 + 128 * 64 + 640)
    assert bench.flops == PASSES * per_sample * SMALL.batch_size
    assert matrix_rate(CPU, "fp32") > 1e8


def test_the_command_writes_a_table_and_json(tmp_path):
    file = tmp_path / "bench.json"
    words = "bench --nets digits-cnn --engines stacked,sequential --per-round 2 --clients 4 --samples 60 --turns 1"
    result = CliRunner().invoke(app, [*words.split(), "--device", "cpu", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "stacked fp32" in result.output
    found = json.loads(file.read_text())
    assert [t["engine"] for t in found["timings"]] == ["stacked", "sequential"]
    assert [t["exact"] for t in found["timings"]] == [True, True]
    assert found["work"][0]["plain_loop_threads"] >= 1
    assert found["matrix_rates"]["fp32"] > 1e8


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--nets no-such", "unknown nets"),
        ("--nets ,", "at least one"),
        ("--runs x", "integers"),
        ("--runs 0", "runs must be at least 1"),
        ("--turns 0", "turns must be at least 1"),
        ("--precisions half", "unknown precisions"),
        ("--samples 5", "samples must be at least 200"),
        ("--json /no/such/folder/x.json", "in an existing directory"),
        ("--json /", "in an existing directory"),
    ],
)
def test_wrong_words_are_refused(words, text):
    result = CliRunner().invoke(app, ["bench", *words.split()])
    assert isinstance(result.exception, SettingError)
    assert text in str(result.exception)
