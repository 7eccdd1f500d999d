"""Trials of variants of FedCat-Plus, judged on validation data alone: the test data is never evaluated.

    python benchmarks/plus_trials.py parts --data-dir DIR --minutes 8 --out trials.jsonl
    python benchmarks/plus_trials.py methods --rows digits-0.1,digits-0.1/epochs=1,digits-1.0/per_round=2/rounds=250

The trials of a series run side by side, each on every row, with data held out from every client. A row may change
settings. One line of JSON is written for each run: the validation accuracies of its global model, of that model's
average over rounds, and of other averages that a trial keeps.
"""

from __future__ import annotations

import argparse
import json
import time
from copy import copy
from functools import cached_property
from pathlib import Path

import torch

from fedcat.config.resolve import OF_METHODS
from fedcat.core.options import Typed
from fedcat.data.federation import EvaluationSet
from fedcat.methods.average import RunningAverage
from fedcat.methods.fedcat_plus import FedCatPlus
from fedcat.runs.build import Builder
from fedcat.runs.driver import Driver

HELD_OUT, AVERAGE = 0.1, 0.95
ALPHAS = (0.1, 0.5, 1.0)
LAB = {"preset": "lab", "rounds": 1000}
SMALL = {"lr": 0.03, "clients": 50, "per_round": 5, "rounds": 100, "min_samples": 5, "validation": 0.2}
ROWS = {
    **{f"{n}-{a}": {**LAB, "dataset": n, "alpha": a} for n in ("cifar10", "cifar100", "mnist") for a in ALPHAS},
    "femnist": {**LAB, "dataset": "femnist", "rounds": 1008},
    **{f"digits-{a}": {"dataset": "digits", "alpha": a, **SMALL} for a in ALPHAS},
}


class Trial(FedCatPlus):
    """FedCat-Plus whose distance grows with another power of the way, or whose lead has no limit but its own.

    Its own steps may stay longer. It may keep more averages over rounds, of other memories, which are evaluated beside
    its own.
    """

    power, limited, fading, memories = 2, True, True, ()

    @cached_property
    def more(self):
        """The averages that it keeps beside its own."""
        return {f"average {memory:g}": RunningAverage(memory) for memory in self.memories}

    def _complete(self, round):
        arrived = bool(self._steps)
        super()._complete(round)
        for average in self.more.values() if arrived else ():
            average.add(self._mean(self.copies, self.seen))

    def models(self, *wanted):
        known = {name: average.row for name, average in self.more.items() if average.row is not None}
        return {**super().models(*wanted), **known}

    def _share(self, round):
        return super()._share(round) if self.limited else min(self.limit, round / (round + self.warm_up))

    def _hop(self, copy, round):
        way = self.way
        self.way = way if self.fading else 0.0
        hop = super()._hop(copy, round)
        self.way = way
        return hop

    def _scaled(self, deviations):
        spread = self.spread
        self.spread = spread * self.way ** (self.power - 2)
        scaled = super()._scaled(deviations)
        self.spread = spread
        return scaled


def variant(options=None, **attributes):
    """Return the method with other options and attributes."""
    return type("FedCatPlus", (Trial,), attributes), options or {}


RIVALS = {
    **{name: (name, {}) for name in ("fedavg", "scaffold", "fedcross", "fedmr", "fedcm")},
    **{f"{name}, lr 0.015": (name, {"lr": 0.015}) for name in ("fedavg", "scaffold", "fedcross", "fedmr", "fedcm")},
    **{f"{name}, clip 10": (name, {"clip": 10.0}) for name in ("scaffold", "fedcm")},
}
METHODS = {
    **{name: RIVALS[name] for name in ("fedavg", "scaffold", "scaffold, clip 10")},
    "fedcat": ("fedcat", {}),
    "as in the package": variant(),
    "clip 10": variant({"clip": 10.0}),
}
SERIES = {
    "parts": {
        **METHODS,
        "scaffold, lr 0.015": RIVALS["scaffold, lr 0.015"],
        **{f"own {value:g}": variant({"own": value}) for value in (0.0, 0.5)},
        "skew 0": variant({"skew": 0.0}),
        **{f"gain {value:g}": variant({"gain": value}) for value in (0.25, 0.5, 2.0)},
        **{f"spread {value:g}": variant({"spread": value}) for value in (0.1, 0.2)},
        "smoothing 0.98": variant({"smoothing": 0.98}),
        "momentum 0.9": variant({"momentum": 0.9}),
        "momentum 0.9, clip 10": variant({"momentum": 0.9, "clip": 10.0}),
    },
    "distances": {
        **{name: RIVALS[name] for name in ("fedavg", "scaffold", "scaffold, lr 0.015")},
        **{
            f"gain {gain:g}, spread {spread:g}, power {power}": variant({"gain": gain, "spread": spread}, power=power)
            for gain in (0.5, 1.0)
            for spread, power in ((0.15, 2), (0.2, 2), (0.3, 4))
        },
    },
    "rivals": RIVALS,
    "methods": METHODS,
    "averages": {"as in the package": variant(memories=(9, 2, 1))},
    "gains": {
        **METHODS,
        "gain 0": variant({"gain": 0.0}),
        **{f"gain {gain:g}": variant({"gain": gain}) for gain in (0.5, 2.0)},
        **{f"gain {gain:g}, constant": variant({"gain": gain}, fading=False) for gain in (0.5, 1.0)},
        **{f"spread {value:g}": variant({"spread": value}) for value in (0.0, 0.05, 0.1)},
        "lead 0": variant({"lead": 0.0}),
    },
    "leads": {
        **METHODS,
        **{f"lead {lead:g}": variant({"lead": lead}, limited=False) for lead in (0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)},
    },
}


def judged_on_validation(federation):
    """Return a federation whose test data is the clients' validation data."""
    held, found = federation.validation, copy(federation)
    vars(found).update(test_set=EvaluationSet(held.pool, held.index.cpu().numpy()), validation=None, client_test=None)
    return found


def settings_of(row):
    """Return the settings of a row such as digits-0.1/epochs=1."""
    name, *changes = row.split("/")
    changed = dict(change.split("=") for change in changes)
    return {**ROWS[name], **{key: Typed(value) for key, value in changed.items()}}


def build(builder, trial, row, seed, given):
    """Build one run."""
    method, options = trial
    alone = {name: value for name, value in options.items() if name in OF_METHODS}
    own = {"method_options": {name: value for name, value in options.items() if name not in OF_METHODS}}
    settings = {"method": method, "seed": seed, **settings_of(row), **alone, **own, **given}
    run = builder.build({"validation": HELD_OUT, "average": AVERAGE, **settings})
    run.federation = judged_on_validation(run.federation)
    return run


def line_of(trial, row, seed, run):
    """Return what is kept of a run."""
    known = [record for record in run.history if record.evaluated]
    others = list(known[-1].others) if known else ["average"]
    return {
        "trial": trial,
        "row": row,
        "seed": seed,
        "rounds": [r.round for r in known],
        "accuracy": [round(record.metrics["accuracy"], 4) for record in known],
        **{name: [round(record.others[name]["accuracy"], 4) for record in known] for name in others},
    }


def main():
    """Run a series."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", choices=SERIES)
    parser.add_argument("--trials", help="some of the series, by name: such as 'own 0;gain 2' [all]")
    parser.add_argument("--rows", default="cifar10-0.1,cifar10-1.0,femnist", help=f"{', '.join(ROWS)}; see above")
    parser.add_argument("--seeds", default="20", help="such as 20,21")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, default=Path("trials.jsonl"))
    arguments = parser.parse_args()
    series = SERIES[arguments.series]
    trials = arguments.trials.split(";") if arguments.trials else list(series)
    cuda = torch.cuda.is_available()
    given = {"precision": arguments.precision} if cuda else {"workers": 1, "exact": False}
    given |= {"data_dir": arguments.data_dir} if arguments.data_dir else {}
    builder, runs = Builder(), {}
    for seed in map(int, arguments.seeds.split(",")):
        for name in trials:
            for row in arguments.rows.split(","):
                runs[name, row, seed] = build(builder, series[name], row, seed, given)
    begin = told = time.perf_counter()
    driver = Driver(list(runs.values()))
    driver.start()
    while driver.active and time.perf_counter() - begin < 60 * arguments.minutes:
        driver.step()
        if time.perf_counter() - told > 30:
            told = time.perf_counter()
            print(f"{told - begin:.0f} s, round {min(len(run.history) for run in runs.values())}", flush=True)
    with arguments.out.open("a") as file:
        for key, run in runs.items():
            file.write(json.dumps(line_of(*key, run)) + "\n")
    print(f"{len(runs)} runs in {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
