"""Callbacks: what they are told, how they stop a run, and what their errors do."""

from __future__ import annotations

import json
import math

import pytest
from helpers import drive, federation, layout_of, simulate, small_net, step

import fedcat
from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg
from fedcat.runs.state import decode, encode

FED = federation([3, 9, 5, 12, 7, 4])
LAYOUT = layout_of(small_net())
SHORT = {"dataset": "digits", "clients": 20, "rounds": 4, "epochs": 1, "evaluate_every": 2}


class Noted(fedcat.Callback):
    """Writes down what it is told."""

    def __init__(self):
        self.events = []

    def on_start(self, run):
        self.events.append(("start", run.resumed))

    def on_evaluate(self, run, record):
        self.events.append(("evaluate", record.round, record.accuracy is not None))

    def on_round(self, run, record):
        self.events.append(("round", record.round))

    def on_end(self, run):
        self.events.append(("end", run.status))

    def state(self):
        return {"seen": len(self.events)}

    def restore(self, state):
        self.events.append(("restored", state["seen"]))


def test_the_order_of_events():
    noted = Noted()
    fedcat.run(method="fedavg", callbacks=[noted], **SHORT)
    assert noted.events == [
        ("start", False),
        ("round", 1),
        ("evaluate", 2, True),
        ("round", 2),
        ("round", 3),
        ("evaluate", 4, True),
        ("round", 4),
        ("end", "finished"),
    ]


def test_an_object_is_told_of_all_runs_and_a_class_makes_one_for_each():
    made = []

    class Own(Noted):
        def __init__(self):
            super().__init__()
            made.append(self)

    shared = Noted()
    fedcat.compare(["fedavg", "fedprox"], 1, callbacks=[shared, Own], **SHORT)
    assert shared.events.count(("end", "finished")) == 2
    assert [one.events.count(("start", False)) for one in made] == [1, 1]


class StopAfter(fedcat.Callback):
    def __init__(self, round, name="fedavg"):
        self.round, self.name = round, name

    def on_round(self, run, record):
        if run.name.startswith(self.name) and record.round == self.round:
            run.stop("enough")


def test_a_run_that_a_callback_stops_leaves_its_neighbours_alone(tmp_path):
    stopped, whole = fedcat.compare(["fedavg", "fedprox"], 1, callbacks=[StopAfter(1)], out=tmp_path / "c", **SHORT)
    (stopped,), (whole,) = stopped.results, whole.results
    assert (stopped.status, len(stopped.history)) == ("stopped", 1)
    assert (whole.status, len(whole.history)) == ("finished", 4)
    assert "stopped after round 1 of 4: enough" in stopped.summary.notes
    alone = fedcat.run(method="fedprox", **SHORT)
    assert whole.history[-1].metrics == alone.history[-1].metrics
    assert stopped.final is not None
    written = json.loads((tmp_path / "c" / "fedavg-seed0" / "run.json").read_text())
    assert (written["status"], written["rounds"]) == ("stopped", 1)
    assert fedcat.load_model(tmp_path / "c" / "fedavg-seed0") is not None


class Broken(fedcat.Callback):
    def __init__(self, event, name="fedavg"):
        self.event, self.name = event, name

    def _maybe(self, event, run):
        if event == self.event and run.name.startswith(self.name):
            raise ZeroDivisionError("my own mistake")

    def on_start(self, run):
        self._maybe("start", run)

    def on_evaluate(self, run, record):
        self._maybe("evaluate", run)

    def on_round(self, run, record):
        self._maybe("round", run)

    def on_end(self, run):
        self._maybe("end", run)


@pytest.mark.parametrize(("event", "rounds"), [("start", 0), ("round", 1), ("evaluate", 2), ("end", 4)])
def test_an_error_in_a_callback_ends_its_run_with_a_clear_message_and_leaves_the_others(event, rounds, tmp_path):
    with pytest.warns(UserWarning, match=f"ZeroDivisionError: my own mistake .in on_{event} of the callback Broken"):
        found = fedcat.compare(["fedavg", "fedprox"], 1, callbacks=[Broken(event)], out=tmp_path / "c", **SHORT)
    failed, whole = (variant.results[0] for variant in found)
    assert (failed.status, len(failed.history)) == ("failed", rounds)
    assert isinstance(failed.error, ZeroDivisionError)
    assert (whole.status, len(whole.history)) == ("finished", 4)


def test_an_error_in_a_single_run_is_raised_after_it_was_written(tmp_path):
    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        fedcat.run(method="fedavg", callbacks=[Broken("round")], out=tmp_path / "run", **SHORT)
    written = json.loads((tmp_path / "run" / "run.json").read_text())
    assert written["status"] == "failed"
    assert any("my own mistake" in note for note in written["notes"])


def test_a_late_failure_is_written_too(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fedcat.run(method="fedavg", callbacks=[Broken("end")], out=tmp_path / "run", **SHORT)
    written = json.loads((tmp_path / "run" / "run.json").read_text())
    assert written["status"] == "failed"
    assert "my own mistake" in written["notes"][-1]


def test_stopping_twice_or_in_the_last_round_is_said_once_or_not_at_all():
    class Twice(fedcat.Callback):
        def __init__(self, round):
            self.round = round

        def on_round(self, run, record):
            if record.round == self.round:
                run.stop("a")
                run.stop("b")

    early, late = (fedcat.run(method="fedavg", callbacks=[Twice(round)], **SHORT) for round in (2, 4))
    assert [note for note in early.summary.notes if "stopped" in note] == ["stopped after round 2 of 4: a"]
    assert (late.status, late.summary.notes) == ("finished", [])


def test_a_run_that_fails_leaves_the_table_of_its_comparison(tmp_path):
    """Two seeds of each method; one run of them is never evaluated."""
    with pytest.warns(UserWarning, match="my own mistake"):
        found = fedcat.compare(
            ["fedavg", "fedprox"], 2, callbacks=[Broken("start", "fedavg-seed1")], out=tmp_path / "c", **SHORT
        )
    mean, deviation = found[0].mean_std("best")
    assert math.isnan(mean)
    assert math.isnan(deviation)
    assert found[1].mean_std("best")[0] > 0
    lines = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert lines[0]["best"] == {"mean": None, "std": None}
    assert lines[0]["runs"][0]["best"] > 0
    assert "nan" in repr(found[0])


def test_a_misspelled_event_is_refused():
    with pytest.raises(TypeError, match="has on_evaluation, which is no event: the events are on_start, on_evaluate"):

        class Wrong(fedcat.Callback):
            def on_evaluation(self, run, record):
                pass


def test_what_is_no_callback_is_refused(tmp_path):
    with pytest.raises(SettingError, match="callbacks must be a list, got"):
        fedcat.run(callbacks=Noted(), **SHORT)
    for wrong in (3, dict, lambda: 5, lambda run, record: None):
        with pytest.raises(SettingError, match="callbacks must be Callback objects or classes"):
            fedcat.run(callbacks=[wrong], out=tmp_path / "run", **SHORT)
    assert not (tmp_path / "run").exists()


def test_a_callbacks_state_travels_with_the_run():
    first, second = (simulate(FedAvg, FED, LAYOUT, run_name="a", rounds=4) for _ in range(2))
    first.callbacks, second.callbacks = [Noted(), StopAfter(9)], [StopAfter(9), Noted()]
    for _ in range(2):
        step(first)
    plain, tensors = encode(first.state())
    second.restore(decode(json.loads(json.dumps(plain)), tensors))
    drive(second)
    events = second.callbacks[1].events
    assert events[:2] == [("restored", len(first.callbacks[0].events)), ("start", True)]
    assert [event[1] for event in events if event[0] == "round"] == [3, 4]


def test_early_stopping_as_the_docs_show_it():
    class Patience(fedcat.Callback):
        def __init__(self):
            self.best, self.since = -1.0, 0

        def on_evaluate(self, run, record):
            better = record.accuracy > self.best
            self.best, self.since = max(self.best, record.accuracy), 0 if better else self.since + 1
            if self.since == 2:
                run.stop(f"no better than {self.best:.1%} for 2 evaluations")

    words = {**SHORT, "rounds": 60, "evaluate_every": 1, "lr": 1e-6}
    result = fedcat.run(method="fedavg", callbacks=[Patience], **words)
    assert result.status == "stopped"
    assert len(result.history) < 60
    scores = result.accuracies
    assert max(scores[:-2]) >= max(scores[-2:])
