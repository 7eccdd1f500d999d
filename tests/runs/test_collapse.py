"""Collapse: noticed by training loss, validation data or numbers that are not finite, never by test data.

Test data can only take back the note that nothing was learned.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import QUICK, drive, federation, layout_of, simulate, small_net

import fedcat
from fedcat.methods import METHODS, FedAvg
from fedcat.models.losses import cross_entropy
from fedcat.protocol.reply_check import NOT_FINITE
from fedcat.runs.collapse import CollapseWatch, entropies
from fedcat.runs.history import Record

SHORT = {"dataset": "digits", "clients": 20, "per_round": 4, "epochs": 1, "lr": 0.1}
FED = federation([3, 9, 5, 12, 7, 4])
LAYOUT = layout_of(small_net())


class Hops:
    """A run whose training loss and validation accuracy are made up."""

    def __init__(self, classes=10):
        self.federation = SimpleNamespace(classes=classes, class_counts=np.full((3, classes), 5) if classes else None)
        loss = cross_entropy if classes else torch.nn.functional.mse_loss
        self.task = SimpleNamespace(loss=loss, rule=SimpleNamespace(own_loss=False))
        self.late_notes, self.stopped, self.name, self.done = [], [], "made up", False
        self.row = torch.zeros(2)
        self.method = SimpleNamespace(models=lambda: {"global": self.row}, state=lambda: {"n": len(self.seen)})
        self.method.rewind = lambda state: self.rewound.append(state["n"])
        self.seen, self.rewound = [], []
        self.history = self.seen

    def stop(self, why):
        self.stopped.append(why)


def feed(watch, run, losses, validation=None):
    watch.on_start(run)
    for loss in losses:
        number = len(run.seen) + 1
        why = NOT_FINITE if loss is None else ""
        hops = [SimpleNamespace(loss=loss, client=0, why=why), SimpleNamespace(loss=None, client=1, why="gone")]
        record = Record(number, hops=hops)
        if validation is not None:
            record.validation = {"accuracy": {"weighted_mean": validation[number - 1]}}
            record.metrics = {"accuracy": 0.0}
        run.seen.append(record)
        watch.on_round(run, record)


def test_the_entropy_of_clients_is_what_a_net_without_knowledge_loses():
    counts = np.array([[1, 1, 0], [4, 0, 0], [1, 1, 2]])
    found = entropies(SimpleNamespace(class_counts=counts))
    assert found == pytest.approx([math.log(2), 0.0, 1.5 * math.log(2)])


def test_a_training_loss_that_falls_back_to_chance_is_told_once():
    run = Hops()
    with pytest.warns(UserWarning, match="made up: the model has collapsed by round 12: the training loss is 1.0"):
        feed(CollapseWatch("warn", 3), run, [2.3, 2.0, 1.5, 1.0, 0.8, 0.7, 0.6, 0.6, 0.6, *[2.4] * 9])
    assert len(run.late_notes) == 1


@pytest.mark.parametrize("losses", [[2.3] * 20, [2.3, 2.0, 1.5, 1.4, 2.4, 2.5, 2.6], [0.5] * 9 + [2.4] + [0.5] * 9])
def test_what_never_learned_or_only_stumbles_has_not_collapsed(losses):
    run = Hops()
    feed(CollapseWatch("warn", 3), run, losses)
    assert run.late_notes == []


@pytest.mark.parametrize(
    ("classes", "accuracies", "validation", "told"),
    [
        (10, [], None, True),
        (10, [0.1, 0.12], None, True),
        (10, [0.3, 0.3], None, True),  # a net that never changed can be lucky
        (10, [0.1, 0.5], None, False),
        (10, [], [0.1] * 9 + [0.5], False),
        (2, [0.5, 0.9], None, False),
    ],
)
def test_a_model_that_is_no_better_than_a_constant_answer_has_learned_nothing(classes, accuracies, validation, told):
    """On clients with few classes, the training loss of led steps can stay above chance while the model learns."""
    run, watch = Hops(classes), CollapseWatch("warn", 2)
    feed(watch, run, [2.4] * 10, validation)
    for record, accuracy in zip(run.seen, accuracies, strict=False):
        record.metrics = {"accuracy": accuracy}
    watch.on_end(run)
    note = "the model has learned nothing: its training loss was never below that of chance"
    assert run.late_notes == ([note] if told else [])


def test_other_losses_are_compared_with_the_beginning():
    run = Hops(classes=0)
    with pytest.warns(UserWarning, match="after 0.10 times"):
        feed(CollapseWatch("warn", 2), run, [50.0, 50.0, 20.0, 5.0, 5.0, 60.0, 60.0])


def test_validation_accuracy_at_the_level_of_a_constant_answer_is_told():
    run = Hops()
    accuracies = [0.1, 0.3, 0.5, 0.6, 0.1, 0.1]
    with pytest.warns(UserWarning, match=r"round 5: validation accuracy 10.0% after 60.0%; a constant answer gives 10"):
        feed(CollapseWatch("warn", 10), run, [1.0] * 6, accuracies)
    run = Hops()
    feed(CollapseWatch("warn", 10), run, [1.0] * 4, [0.1, 0.15, 0.1, 0.1])
    assert run.late_notes == []


def test_numbers_that_are_not_finite_are_told():
    run = Hops()
    run.row = torch.tensor([1.0, math.nan])
    with pytest.warns(UserWarning, match="it contains numbers that are not finite"):
        feed(CollapseWatch("warn", 10), run, [1.0], [0.5])
    run = Hops()
    with pytest.warns(UserWarning, match="the training loss is not a number"):
        feed(CollapseWatch("warn", 2), run, [1.0, math.nan])


def test_a_run_can_be_stopped():
    run = Hops()
    feed(CollapseWatch("stop", 2), run, [0.5, 0.5, 2.4, 2.4])
    (why,) = run.stopped
    assert why.startswith("the model has collapsed by round 4: the training loss is 1.04 times that of chance")


def test_a_model_is_taken_back_at_most_three_times():
    run, watch = Hops(), CollapseWatch("restore", 2)
    with pytest.warns(UserWarning, match="it is taken back to the last good one"):
        feed(watch, run, [*[0.5] * 4, *[2.4] * 20])
    assert run.rewound == [2, 2, 2]  # the model after round 4 led to losses like chance
    assert len(run.late_notes) == 4
    assert "taken back" not in run.late_notes[-1]
    fresh = CollapseWatch("restore", 2)
    fresh.restore(watch.state())
    assert fresh.state() == watch.state()


def test_training_that_gives_no_finite_numbers_any_more_is_told_if_it_did_before():
    run = Hops()
    with pytest.warns(
        UserWarning, match="by round 9: at least half of the hops have given no finite numbers for 3 rounds"
    ):
        feed(CollapseWatch("warn", 2), run, [*[0.5] * 4, None, 0.5, *[None] * 5])
    assert len(run.late_notes) == 1
    run = Hops()
    feed(CollapseWatch("warn", 2), run, [None] * 9)  # as if all replies were corrupt
    assert not run.late_notes


def test_a_model_is_not_good_if_a_copy_of_it_diverges_in_every_round():
    """The losses of the other copies are as good as before."""
    run, watch = Hops(), CollapseWatch("restore", 2)
    watch.on_start(run)
    for number in range(1, 13):
        broken = number > 6
        hops = [SimpleNamespace(loss=0.5, client=client, why="") for client in range(2)]
        hops.append(SimpleNamespace(loss=None if broken else 0.5, client=2, why=NOT_FINITE if broken else ""))
        record = Record(number, hops=hops)
        run.seen.append(record)
        watch.on_round(run, record)
    assert watch.state()["good"] == {"n": 4}  # the one of round 6 was followed by such rounds alone
    assert not run.late_notes


def test_a_model_is_not_good_before_losses_came_after_it():
    run, watch = Hops(), CollapseWatch("restore", 2)
    with pytest.warns(UserWarning, match="it is taken back to the last good one"):
        feed(watch, run, [*[0.5] * 6, None, None, 2.4, 2.4])
    assert run.rewound == [4]


def test_a_loss_with_terms_of_its_own_is_not_compared_with_chance():
    run, watch = Hops(), CollapseWatch("restore", 2)
    run.task.rule.own_loss = True
    feed(watch, run, [9.0, 9.0, 8.0, 8.0, 8.0, 8.0, 12.0, 12.0])
    watch.on_end(run)
    assert not run.late_notes
    with pytest.warns(UserWarning, match="it is taken back to the last good one"):
        feed(watch, run, [None] * 3)
    assert run.rewound == [4]


@pytest.mark.parametrize("method", ["fedavg", "fedcat"])
def test_bans_are_taken_back_with_the_model(method):
    """Honest clients whose replies were refused because the model had collapsed are selected again."""

    class Back(fedcat.Callback):
        def on_round(self, run, record):
            bans = run.method.bans
            if record.round == 4:
                self.state = run.method.state()
                bans.count(range(10))
                assert len(bans.banned) == 10
            if record.round == 7:
                run.method.rewind(self.state)
                assert (bans.banned, bans.refused) == ([], {})

    result = fedcat.run(method=method, callbacks=[Back()], rounds=40, ban_after=1, **SHORT, evaluate_every=4)
    assert {client for record in result.history[8:] for client in record.clients} == set(range(20))


@pytest.mark.parametrize("method", [name for name, _ in METHODS])
def test_every_method_can_be_taken_back(method):
    """The model is the old one, the rounds and the selection go on."""

    class Back(fedcat.Callback):
        def on_round(self, run, record):
            if record.round == 4:
                self.state, self.row = run.method.state(), run.method.models()["global"].clone()
            if record.round == 7:
                run.method.rewind(self.state)
                assert torch.equal(run.method.models()["global"], self.row)
                assert run.method.round == 7

    back = Back()
    words = {**SHORT, "method_options": QUICK.get(method, {}), "rounds": 10, "average": 0.9, "evaluate_every": 4}
    result = fedcat.run(method=method, callbacks=[back], **words)
    plain = fedcat.run(method=method, **words)
    assert result.status == "finished"
    if method != "clusamp":  # who selects by what was learned
        assert [record.clients for record in result.history] == [record.clients for record in plain.history]


def test_a_run_that_really_collapses(tmp_path):
    """In rounds 14 to 16 the global model is lost; it is taken back, and training goes on."""

    class Spoiled(FedAvg):
        def reduce(self, hops, replies):
            mean = super().reduce(hops, replies)
            return mean * 0 if 14 <= self.round < 17 else mean

    words = {**SHORT, "rounds": 40, "evaluate_every": 5, "epochs": 4, "alpha": 1.0}
    with pytest.warns(UserWarning, match="it is taken back to the last good one"):
        result = fedcat.run(method=Spoiled, on_collapse="restore", **words)
    with pytest.warns(UserWarning, match="the model has collapsed by round"):
        plain = fedcat.run(method=Spoiled, **words)
    assert result.accuracy > 0.8
    assert plain.accuracy < 0.3
    with pytest.warns(UserWarning, match="stopped after round"):
        stopped = fedcat.run(method=Spoiled, on_collapse="stop", **words)
    assert stopped.status == "stopped"
    assert len(stopped.history) < 30


def test_a_method_of_ones_own_says_that_it_cannot_be_taken_back():
    run = simulate(FedAvg, FED, LAYOUT, rounds=2)
    drive(run)
    with pytest.raises(fedcat.SettingError, match="on_collapse cannot be 'restore': the method FedAvg cannot take"):
        fedcat.Method.rewind(run.method, {})
