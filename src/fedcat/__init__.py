"""Federated learning on skewed data: FedCat and its baselines.

Names are imported when they are first used: `fedcat --version` and an interrupt need no PyTorch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedcat.version import __version__

if TYPE_CHECKING:
    from fedcat.api import compare, load_model, resume, run
    from fedcat.config.settings import Settings
    from fedcat.core.errors import DataError, SettingError
    from fedcat.core.rng import Purpose, random_stream
    from fedcat.data.augment import AUGMENTATIONS, Augmentation
    from fedcat.data.dataset import DATASETS, Dataset, load_dataset
    from fedcat.data.federation import Federation
    from fedcat.data.partitions import PARTITIONS, partition
    from fedcat.data.pool import Normalize, Pool
    from fedcat.methods import METHODS, FedAvg, FedCat
    from fedcat.methods.aggregation import AGGREGATORS, Aggregator
    from fedcat.methods.average import weighted_mean
    from fedcat.methods.base import Context, Method, ServerWork
    from fedcat.methods.client_memory import ClientMemory
    from fedcat.methods.rounds import RoundMethod
    from fedcat.methods.selection import SELECTORS
    from fedcat.methods.server_optimizer import SERVER_OPTIMIZERS, ServerOptimizer
    from fedcat.models.layout import Layout
    from fedcat.models.losses import LOSSES
    from fedcat.models.metrics import METRICS, ClientScores, Metric
    from fedcat.models.nets import NETS
    from fedcat.protocol.hop import Hop, HopId
    from fedcat.protocol.local_optimizer import OPTIMIZERS, LocalOptimizer
    from fedcat.protocol.local_rule import Batch, LocalRule, LossInputs
    from fedcat.protocol.reply import Reply, Status
    from fedcat.protocol.task import Task
    from fedcat.runs.callbacks import Callback
    from fedcat.runs.comparison import Comparison
    from fedcat.runs.driver import Driver
    from fedcat.runs.history import Record
    from fedcat.runs.result import Result
    from fedcat.runs.run import Run
    from fedcat.runs.summary import Choice, Decisions, Figures, RunSummary
    from fedcat.runs.variant_result import VariantResult

_HOMES = {
    "api": ("compare", "load_model", "resume", "run"),
    "config.settings": ("Settings",),
    "core.errors": ("DataError", "SettingError"),
    "core.rng": ("Purpose", "random_stream"),
    "data.augment": ("AUGMENTATIONS", "Augmentation"),
    "data.dataset": ("DATASETS", "Dataset", "load_dataset"),
    "data.federation": ("Federation",),
    "data.partitions": ("PARTITIONS", "partition"),
    "data.pool": ("Normalize", "Pool"),
    "methods": ("METHODS", "FedAvg", "FedCat"),
    "methods.aggregation": ("AGGREGATORS", "Aggregator"),
    "methods.average": ("weighted_mean",),
    "methods.base": ("Context", "Method", "ServerWork"),
    "methods.client_memory": ("ClientMemory",),
    "methods.rounds": ("RoundMethod",),
    "methods.selection": ("SELECTORS",),
    "methods.server_optimizer": ("SERVER_OPTIMIZERS", "ServerOptimizer"),
    "models.layout": ("Layout",),
    "models.losses": ("LOSSES",),
    "models.metrics": ("METRICS", "ClientScores", "Metric"),
    "models.nets": ("NETS",),
    "protocol.hop": ("Hop", "HopId"),
    "protocol.local_optimizer": ("OPTIMIZERS", "LocalOptimizer"),
    "protocol.local_rule": ("Batch", "LocalRule", "LossInputs"),
    "protocol.reply": ("Reply", "Status"),
    "protocol.task": ("Task",),
    "runs.callbacks": ("Callback",),
    "runs.comparison": ("Comparison",),
    "runs.variant_result": ("VariantResult",),
    "runs.driver": ("Driver",),
    "runs.history": ("Record",),
    "runs.result": ("Result",),
    "runs.run": ("Run",),
    "runs.summary": ("Choice", "Decisions", "Figures", "RunSummary"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOME:
        if find_spec(f"fedcat.{name}") is not None:
            return import_module(f"fedcat.{name}")
        raise AttributeError(f"module 'fedcat' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"fedcat.{_HOME[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AGGREGATORS",
    "AUGMENTATIONS",
    "DATASETS",
    "LOSSES",
    "METHODS",
    "METRICS",
    "NETS",
    "OPTIMIZERS",
    "PARTITIONS",
    "SELECTORS",
    "SERVER_OPTIMIZERS",
    "Aggregator",
    "Augmentation",
    "Batch",
    "Callback",
    "Choice",
    "ClientMemory",
    "ClientScores",
    "Comparison",
    "Context",
    "DataError",
    "Dataset",
    "Decisions",
    "Driver",
    "FedAvg",
    "FedCat",
    "Federation",
    "Figures",
    "Hop",
    "HopId",
    "Layout",
    "LocalOptimizer",
    "LocalRule",
    "LossInputs",
    "Method",
    "Metric",
    "Normalize",
    "Pool",
    "Purpose",
    "Record",
    "Reply",
    "Result",
    "RoundMethod",
    "Run",
    "RunSummary",
    "ServerOptimizer",
    "ServerWork",
    "SettingError",
    "Settings",
    "Status",
    "Task",
    "VariantResult",
    "__version__",
    "compare",
    "load_dataset",
    "load_model",
    "partition",
    "random_stream",
    "resume",
    "run",
    "weighted_mean",
]
