"""Runs of the paper's experiments, made up for tests."""

from __future__ import annotations

import pytest

from fedcat.paper.archive import Machine, StoredRun
from fedcat.paper.case import Case
from fedcat.paper.participation import Participation

MACHINE = Machine("a GPU", "2.0", "abc1234", "0123456789ab")


def stored(case: Case, seed: int, accuracy=(), *, price=100, machine=MACHINE, **more) -> StoredRun:
    """Return a run that was evaluated every 10 rounds and moved `price` bytes between two evaluations."""
    places = range(1, 1 + max(len(accuracy), len(more.get("validation", ()))))
    given = {
        "average": [],
        "validation": [],
        "participation": Participation([3, 1], [0.5] * len(places), [1] * len(places), [2] * len(places), [0.9], 2.0),
        "clients": {},
        "seconds": 1.0,
        "settings": {},
        **more,
    }
    rounds, traffic = [10 * place for place in places], [price * place for place in places]
    return StoredRun(case, seed, machine, "finished", rounds, traffic, list(accuracy), **given)


@pytest.fixture
def make_run():
    """Return the function that makes up runs."""
    return stored
