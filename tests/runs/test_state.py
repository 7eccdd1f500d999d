"""The codec of states: what comes back is what went in, and nothing else is taken."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import drive, federation, layout_of, simulate, small_net, step
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcat
from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg, FedCat, Method
from fedcat.methods.scaffold import Scaffold
from fedcat.runs.build import Builder
from fedcat.runs.callbacks import Callback
from fedcat.runs.run_files import read_history
from fedcat.runs.state import check_like, encode, load_state, save_state

FED = federation([3, 9, 5, 12, 7, 4])
LAYOUT = layout_of(small_net())

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.integers(0, 4).map(lambda n: torch.arange(n, dtype=torch.float64) / 7),
    st.integers(0, 3).map(lambda n: np.arange(n, dtype=np.int32)),
)
KEYS = st.text(max_size=4).filter(lambda key: not key.startswith("$"))
STATES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, list):
        return type(b) is list and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@given(state=STATES)
@settings(max_examples=60, deadline=None)
def test_a_state_comes_back_from_its_file(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("state") / "s.safetensors"
    save_state(path, state)
    assert equal(load_state(path), state)


def test_numbers_that_json_does_not_know(tmp_path):
    save_state(tmp_path / "s", {"a": [math.inf, -math.inf, math.nan]})
    found = load_state(tmp_path / "s")["a"]
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": [1, (2, 3)]}, r"state.a\[1\] is a tuple"),
        ({"a": {1: 2}}, "state.a has the key 1"),
        ({"$tensor": 2}, "state has the key '\\$tensor'"),
        ({"a": {"b": object()}}, "state.a.b is a object"),
        ({"a": np.float64(1.0)}, "state.a is a float64"),
        ({"a": np.array(["x"])}, "state.a is a ndarray"),
        ({"a": {1, 2}}, "state.a is a set"),
        ({"a": Counter("x")}, "state.a is a Counter"),
        ({"a": lambda: 0}, "state.a is a function"),
    ],
)
def test_unknown_types_are_refused_with_their_place(state, place):
    with pytest.raises(TypeError, match=place):
        encode(state)


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "s").write_bytes(b"not a state")
    with pytest.raises(SettingError, match="is damaged, or not a state that fedcat wrote"):
        load_state(tmp_path / "s")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "t")
    with pytest.raises(SettingError, match="is damaged, or not a state that fedcat wrote"):
        load_state(tmp_path / "t")


@pytest.mark.parametrize("method", [FedAvg, FedCat, Scaffold])
def test_a_run_goes_on_from_a_file(method, tmp_path):
    whole, broken, resumed = (simulate(method, FED, LAYOUT, run_name="a", rounds=5, average=0.9) for _ in range(3))
    drive(whole)
    for _ in range(2):
        step(broken)
    save_state(tmp_path / "s", broken.state())
    resumed.restore(load_state(tmp_path / "s"))
    drive(resumed)
    assert torch.equal(resumed.method.row, whole.method.row)
    assert resumed.history[-1].metrics == whole.history[-1].metrics
    assert (resumed.ledger.up, resumed.ledger.down) == (whole.ledger.up, whole.ledger.down)
    assert resumed.seconds >= broken.seconds


def test_the_state_of_another_run_is_refused():
    state = simulate(FedAvg, FED, LAYOUT).state()
    with pytest.raises(SettingError, match="the state is of another run: its federation is"):
        simulate(FedAvg, federation([3, 9, 5, 12, 7, 5]), LAYOUT).restore(state)
    with pytest.raises(SettingError, match="its version is 0, this one's 2"):
        simulate(FedAvg, FED, LAYOUT).restore({**state, "version": 0})
    short = simulate(FedAvg, FED, LAYOUT)
    step(short)
    with pytest.raises(SettingError, match="the state is of round 1, but the history ends at 0"):
        simulate(FedAvg, FED, LAYOUT).restore(short.state(), history=[])


def test_a_state_without_a_history_says_where_it_is(tmp_path):
    class Keep(Callback):
        def on_round(self, run, record):
            if record.round == 2:
                save_state(tmp_path / "s", run.state())

    words = {"method": "fedavg", "dataset": "digits", "clients": 20, "rounds": 4, "epochs": 1}
    whole = fedcat.run(out=tmp_path / "run", callbacks=[Keep], **words)
    again = Builder().build(words)
    state = load_state(tmp_path / "s")
    with pytest.raises(SettingError, match="does not hold the history, which the run's directory keeps"):
        again.restore(state)
    again.restore(state, read_history(tmp_path / "run"))
    drive(again)
    assert again.history[-1].metrics == whole.history[-1].metrics


def test_a_run_that_has_ended_can_go_on_from_a_state():
    run = simulate(FedAvg, FED, LAYOUT, run_name="a", rounds=4)
    step(run)
    state = run.state()
    drive(run)
    row = run.method.row
    run.restore(state)
    assert (run.status, run.done, len(run.history)) == ("running", False, 1)
    drive(run)
    assert torch.equal(run.method.row, row)


def test_a_method_that_completes_several_rounds_at_once_is_recorded_round_by_round():
    class Eager(FedAvg):
        """Every reply is a round."""

        def plan(self, until):
            return super().plan(until) if self.round + len(self._hops) < until else []

        def absorb(self, replies):
            super().absorb(replies)
            self.round = min(4 * self.round, 12) if replies and self.round % 4 else self.round

    run = drive(simulate(Eager, FED, LAYOUT, k=4, rounds=4, evaluate_every=1), barrier=False)
    assert [record.round for record in run.history] == [1, 2, 3, 4]


def test_traffic_adds_up_for_a_method_that_validation_steers(tmp_path):
    class Steered(FedAvg):
        def validated(self, scores):
            pass

    words = {"dataset": "digits", "clients": 20, "rounds": 4, "epochs": 1, "evaluate_every": 2, "validation": 0.2}
    result = fedcat.run(method=Steered, out=tmp_path / "run", **words)
    lines = [line.split(",") for line in (tmp_path / "run" / "traffic.csv").read_text().splitlines()[1:]]
    down, up, evaluation = (sum(int(line[column]) for line in lines) for column in (4, 5, 6))
    assert {"down": down, "up": up, "evaluation": evaluation} == result.summary.bytes
    assert (result.history[-1].down, result.history[-1].up, evaluation) == (down, up, 0)
    assert result.summary.relative_traffic > 1.5


def test_a_steering_evaluation_counts_as_training_traffic():
    class Steered(FedAvg):
        def __init__(self, context):
            super().__init__(context)
            self.scores = []

        def validated(self, scores):
            self.scores.append(scores)

    held = FED.hold_out(validation=0.3)
    assert Steered.validated is not Method.validated
    plain, steered = (simulate(method, held, LAYOUT, rounds=2, evaluate_every=1) for method in (FedAvg, Steered))
    drive(plain)
    drive(steered)
    clients = len(steered.method.scores[0].clients)
    assert len(steered.method.scores) == 2
    spent = 2 * clients * (LAYOUT.size * 8 + 8 * 3)
    assert (plain.ledger.evaluation, steered.ledger.evaluation) == (spent, 0)
    assert steered.ledger.total - plain.ledger.total == spent


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": None, "b": [1], "c": {}}, "state.a is a NoneType, not a float"),
        ({"a": 1, "b": ["x"], "c": {}}, r"state.b\[0\] is a str, not a int"),
        ({"a": 1.0, "b": [1]}, "state.c is missing"),
        ({"a": True, "b": [1], "c": {}}, "state.a is a bool"),
        ({"a": 1.0, "b": [1], "c": {"row": torch.zeros(3)}}, r"state.c.row is torch.float32 of shape \(3,\), not"),
    ],
)
def test_a_state_that_is_built_otherwise_is_refused(state, place):
    like = {"a": 0.5, "b": [7], "c": {"row": torch.zeros(2)} if "row" in state.get("c", {}) else {}}
    with pytest.raises(TypeError, match=place):
        check_like(state, like)


def test_a_state_of_the_same_build_passes():
    like = {"a": 0.5, "b": [], "c": {}, "d": None, "row": torch.zeros(2)}
    check_like({"a": 3, "b": [[1]], "c": {"7": 1}, "d": {"x": 1}, "row": torch.ones(2), "more": 1}, like)
