"""Federated learning on skewed data: FedCat and its rivals."""

from fedcat.api import compare, load_model, run
from fedcat.config.settings import Settings
from fedcat.core.errors import DataError, SettingError
from fedcat.core.rng import Purpose, chance
from fedcat.data.dataset import DATASETS, Dataset, load_dataset
from fedcat.data.federation import Federation
from fedcat.data.partitions import PARTITIONS, partition
from fedcat.data.pool import Normalise, Pool
from fedcat.methods import METHODS, FedAvg, FedCat
from fedcat.methods.average import weighted_mean
from fedcat.methods.base import Context, Method, ServerWork
from fedcat.methods.client_memory import DeviceMemory
from fedcat.methods.rounds import RoundMethod
from fedcat.methods.selection.base import SELECTORS
from fedcat.methods.server_optimizer import SERVER_STEPS, ServerStep
from fedcat.models.layout import Layout
from fedcat.models.nets import NETS
from fedcat.protocol.hop import Hop, Reply, Status
from fedcat.protocol.local_rule import Batch, Beside, LocalRule, Task
from fedcat.runs.comparison import Comparison, Line
from fedcat.runs.runner import Result
from fedcat.runs.simulation import Record, Simulation, run_together
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
