import math

import pytest

from fedcat.config.schedules import SCHEDULES, schedule
from fedcat.core.errors import SettingError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.8, 0.8, 0.8, 0.8]),
        ("step", [0.8, 0.8, 0.4, 0.4]),
        ("inverse", [0.8, 0.8 / 1.5, 0.4, 0.8 / 2.5]),
        ("cosine", [0.8, 0.4 * (1 + 2**-0.5), 0.4, 0.4 * (1 - 2**-0.5)]),
    ],
)
def test_step_sizes_by_round(name, expected):
    lr = schedule(name, 0.8, rounds=4, decay=0.5, every=2)
    assert [lr(r) for r in range(4)] == pytest.approx(expected)


def test_an_unknown_schedule_is_named():
    with pytest.raises(SettingError, match="unknown lr_schedule 'cosin': did you mean 'cosine'"):
        schedule("cosin", 0.1, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.3] * 7),
        ("step", [0.3, 0.3, 0.3, 0.03, 0.03, 0.03, 0.003]),
        ("inverse", [0.3 / (1 + 0.1 * r) for r in range(7)]),
        ("cosine", [0.3 * (1 + math.cos(math.pi * r / 6)) / 2 for r in range(7)]),
    ],
)
def test_step_sizes_with_a_decay_of_a_tenth_every_three_of_six_rounds(name, expected):
    lr = schedule(name, 0.3, rounds=6, decay=0.1, every=3)
    assert [lr(r) for r in range(7)] == pytest.approx(expected)


def test_schedules_by_name():
    assert SCHEDULES == ("constant", "step", "inverse", "inverse-step", "cosine")
