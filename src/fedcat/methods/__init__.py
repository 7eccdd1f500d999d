"""The methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fedcat.core.errors import SettingError
from fedcat.core.options import arguments
from fedcat.core.registry import Registry, accepts_call
from fedcat.methods import robust
from fedcat.methods.base import Context, Method, declared
from fedcat.methods.clusamp import CluSamp
from fedcat.methods.cyclic import Cyclic
from fedcat.methods.fedavg import FedAvg
from fedcat.methods.fedcat import FedCat
from fedcat.methods.fedcat_plus import FedCatPlus
from fedcat.methods.fedcluster import FedCluster
from fedcat.methods.fedcm import FedCM
from fedcat.methods.fedcross import FedCross
from fedcat.methods.fedgen import FedGen
from fedcat.methods.fedmr import FedMR
from fedcat.methods.fedopt import FedAdam, FedAvgM
from fedcat.methods.fedprox import FedProx
from fedcat.methods.scaffold import Scaffold

Factory = Callable[..., Method]

METHODS: Registry[Factory] = Registry("method")
METHODS.add("fedavg", FedAvg, "average the clients' models, weighted by samples (McMahan et al. 2017)")
METHODS.add("fedcat", FedCat, "copies walk through chains of clients, then are averaged (Hu et al. 2022)")
METHODS.add(
    "fedcat-gc",
    partial(FedCat, concatenation=False),
    "FedCat's grouping- and count-based selection only, averaged every round (the paper's w/ GC)",
)
METHODS.add(
    "fedcat-dc",
    partial(FedCat, grouping=False),
    "FedCat's device concatenation only, clients drawn uniformly (the paper's w/ DC)",
)
METHODS.add(
    "fedcat-plus", FedCatPlus, "FedCat whose copies stay apart and whose steps are led, at 1.5 times the traffic"
)
METHODS.add("fedprox", FedProx, "FedAvg with a proximal term in the local loss (Li et al. 2020)")
METHODS.add(
    "scaffold", Scaffold, "control variates correct client drift, at twice the traffic (Karimireddy et al. 2020)"
)
METHODS.add("fedgen", FedGen, "a feature generator, trained on the server, teaches the clients (Zhu et al. 2021)")
METHODS.add("clusamp", CluSamp, "clients drawn from clusters of similar ones (Fraboni et al. 2021, Algorithm 2)")
METHODS.add("fedcross", FedCross, "copies that each take a little of another one after every round (Hu et al. 2022)")
METHODS.add("fedmr", FedMR, "copies that exchange their layers at random after every round (Hu et al. 2024)")
METHODS.add(
    "fedcm", FedCM, "clients' steps follow the last round's direction, at 1.5 times the traffic (Xu et al. 2021)"
)
METHODS.add("fedcluster", FedCluster, "clusters of clients take their steps one after another (Chen et al. 2020)")
METHODS.add("cyclic", Cyclic, "one model walks through the clients, nothing is averaged (Chang et al. 2018)")
METHODS.add("fedavgm", FedAvgM, "FedAvg with server momentum: --server-lr, --server-momentum (Hsu et al. 2019)")
METHODS.add("fedadam", FedAdam, "FedAvg with Adam on the server: --server-lr and so on (Reddi et al. 2021)")


def make_method(name: str, factory: Factory, context: Context, options: Mapping[str, Any]) -> Method:
    """Make a method with checked options, or raise an error that says why `factory` makes none."""
    missing = ", ".join(sorted(getattr(factory, "__abstractmethods__", ())))
    if missing:
        raise SettingError(f"method {name!r} must define {missing}")
    if not callable(factory) or not accepts_call(factory, context, **(given := arguments(factory, options))):
        raise SettingError(f"method {name!r} must be a Method class, or a function of (context, options with defaults)")
    made = factory(context, **given)
    if not isinstance(made, Method):
        raise SettingError(f"method {name!r} must make a Method, got {type(made).__name__}")
    return made


__all__ = ["METHODS", "Context", "Factory", "FedAvg", "FedCat", "Method", "declared", "make_method", "robust"]
