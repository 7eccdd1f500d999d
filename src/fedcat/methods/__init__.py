"""The methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fedcat.core.errors import SettingError
from fedcat.core.registry import Registry, takes
from fedcat.methods.base import Context, Method
from fedcat.methods.clusamp import CluSamp
from fedcat.methods.cyclic import Cyclic
from fedcat.methods.fedavg import FedAvg
from fedcat.methods.fedcat import FedCat
from fedcat.methods.fedcluster import FedCluster
from fedcat.methods.fedgen.fedgen import FedGen
from fedcat.methods.fedopt import FedAdam, FedAvgM
from fedcat.methods.fedprox import FedProx
from fedcat.methods.scaffold import Scaffold

Factory = Callable[..., Method]

METHODS: Registry[Factory] = Registry("method")
METHODS.add("fedavg", FedAvg, "average the devices' models by samples (McMahan et al. 2017)")
METHODS.add("fedcat", FedCat, "copies walk through chains of devices, then are averaged (Hu et al. 2022)")
METHODS.add(
    "fedcat-gc",
    partial(FedCat, concatenation=False),
    "FedCat's grouping- and count-based selection alone, averaged every round (the paper's w/ GC)",
)
METHODS.add(
    "fedcat-dc",
    partial(FedCat, grouping=False),
    "FedCat's device concatenation alone, devices drawn uniformly (the paper's w/ DC)",
)
METHODS.add("fedprox", FedProx, "FedAvg with a pull towards the global model in the loss (Li et al. 2020)")
METHODS.add(
    "scaffold", Scaffold, "control variates keep local steps on course, twice the traffic (Karimireddy et al. 2020)"
)
METHODS.add("fedgen", FedGen, "a generator of features, trained on the server, teaches the devices (Zhu et al. 2021)")
METHODS.add("clusamp", CluSamp, "devices drawn from clusters of similar ones (Fraboni et al. 2021, algorithm 2)")
METHODS.add("fedcluster", FedCluster, "clusters of devices take their steps one after another (Chen et al. 2020)")
METHODS.add("cyclic", Cyclic, "one copy walks through the devices, nothing is averaged (Chang et al. 2018)")
METHODS.add(
    "fedavgm", FedAvgM, "FedAvg with momentum on the server, --server-lr and --server-momentum (Hsu et al. 2019)"
)
METHODS.add("fedadam", FedAdam, "FedAvg with Adam on the server, --server-lr and so on (Reddi et al. 2021)")

_GENERATOR: dict[str, Any] = {
    "hidden": 512,
    "noise": 100,
    "generator_batch": 128,
    "generator_lr": 3e-4,
    "generator_lr_decay": 1.0,
    "decay": 1.0,
}
OF_PAPER: dict[str, dict[str, dict[str, Any]]] = {
    "fedcat": {"": {"epsilon": 0.5, "lambda": 1}},
    "fedcat-gc": {"": {"epsilon": 0.5, "lambda": 1}},
    "fedprox": {
        "mnist": {"mu": 0.1},
        "cifar10": {"mu": 0.01},
        "cifar100": {"mu": 0.001},
        "femnist": {"mu": 0.1},
    },
    "fedgen": {
        "mnist": {
            "hidden": 256,
            "noise": 32,
            "generator_batch": 32,
            "generator_lr": 3e-4,
            "generator_lr_decay": 0.98,
            "a": 10.0,
            "b": 10.0,
            "decay": 0.98,
        },
        "cifar10": {**_GENERATOR, "a": 0.2, "b": 0.2},
        "cifar100": {**_GENERATOR, "a": 10.0, "b": 1.0, "generator_lr": 1e-4},
        "femnist": {**_GENERATOR, "a": 10.0, "b": 10.0},
    },
}
"""The options of methods in the experiments of the FedCat paper, by method and dataset; under "" those of all."""


def paper_options(dataset: str) -> dict[str, dict[str, Any]]:
    """Return the options that the methods have in the experiments of the FedCat paper on a dataset."""
    tables = {name: {**found.get("", {}), **found.get(dataset, {})} for name, found in OF_PAPER.items()}
    return {name: table for name, table in tables.items() if table}


def make_method(name: str, factory: Factory, context: Context, given: Mapping[str, Any]) -> Method:
    """Make a method; what is no method is refused."""
    missing = ", ".join(sorted(getattr(factory, "__abstractmethods__", ())))
    if missing:
        raise SettingError(f"method {name!r} must define {missing}")
    if not callable(factory) or not takes(factory, context, **given):
        raise SettingError(f"method {name!r} must be a Method class, or a function of (context, options with defaults)")
    made = factory(context, **given)
    if not isinstance(made, Method):
        raise SettingError(f"method {name!r} must make a Method, got {type(made).__name__}")
    return made


__all__ = ["METHODS", "Context", "Factory", "FedAvg", "FedCat", "Method", "make_method", "paper_options"]
