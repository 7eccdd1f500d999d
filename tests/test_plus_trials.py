"""benchmarks/plus_trials.py: every trial can be built, is judged on validation data, and changes what it says."""

import importlib.util
from pathlib import Path

import pytest

ROW = "digits-1.0/rounds=3/epochs=1"


@pytest.fixture(scope="module")
def trials():
    path = Path(__file__).parents[1] / "benchmarks" / "plus_trials.py"
    spec = importlib.util.spec_from_file_location("plus_trials", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_trial_is_judged_on_validation_data(trials):
    builder = trials.Builder()
    for series in trials.SERIES.values():
        for trial in series.values():
            run = trials.build(builder, trial, ROW, 20, {"workers": 1})
            assert len(run.federation.test_set.index) == 287  # a fifth of each client's training data
            assert run.federation.validation is None


@pytest.mark.parametrize(("name", "fades"), [("gain 0.5", True), ("gain 0.5, constant", False)])
def test_a_gain_fades_unless_it_is_constant(trials, name, fades):
    run = trials.build(trials.Builder(), trials.SERIES["gains"][name], ROW, 20, {"workers": 1})
    while len(run.history) < 2:
        run.absorb(run.engine.train(run.plan()))
        run.record({})
    (_, hop), *_ = run.plan()
    share, left = 2 / 12, 1 - run.method.way
    assert left < 0.99
    assert hop.lr / 0.03 == pytest.approx((1 - share) * (1 + 0.5 * share * (left if fades else 1)))
