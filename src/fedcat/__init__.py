"""Federated learning on skewed data: FedCat and its rivals."""

from fedcat.api import compare, load_model, run
from fedcat.chance import Purpose, chance
from fedcat.comparison import Comparison, Line
from fedcat.errors import DataError, SettingError
from fedcat.execute import Result
from fedcat.experiment import Settings
from fedcat.federation.datasets import DATASETS, Dataset, load_dataset
from fedcat.federation.federation import Federation
from fedcat.federation.partition import PARTITIONS, partition
from fedcat.federation.pool import Normalise, Pool
from fedcat.hop import Hop, Reply, Status
from fedcat.local import Batch, Beside, LocalRule, Task
from fedcat.methods import METHODS, FedAvg, FedCat
from fedcat.methods.average import weighted_mean
from fedcat.methods.memory import DeviceMemory
from fedcat.methods.method import Context, Method, ServerWork
from fedcat.methods.rounds import RoundMethod
from fedcat.models.layout import Layout
from fedcat.models.nets import NETS
from fedcat.selection import SELECTORS
from fedcat.server import SERVER_STEPS, ServerStep
from fedcat.simulation import Record, Simulation, run_together
from fedcat.version import __version__

__all__ = [
    "DATASETS",
    "METHODS",
    "NETS",
    "PARTITIONS",
    "SELECTORS",
    "SERVER_STEPS",
    "Batch",
    "Beside",
    "Comparison",
    "Context",
    "DataError",
    "Dataset",
    "DeviceMemory",
    "FedAvg",
    "FedCat",
    "Federation",
    "Hop",
    "Layout",
    "Line",
    "LocalRule",
    "Method",
    "Normalise",
    "Pool",
    "Purpose",
    "Record",
    "Reply",
    "Result",
    "RoundMethod",
    "ServerStep",
    "ServerWork",
    "SettingError",
    "Settings",
    "Simulation",
    "Status",
    "Task",
    "__version__",
    "chance",
    "compare",
    "load_dataset",
    "load_model",
    "partition",
    "run",
    "run_together",
    "weighted_mean",
]
