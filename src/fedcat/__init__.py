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
from fedcat.methods.method import Context, DeviceMemory, Method, RoundMethod, weighted_mean
from fedcat.models.layout import Layout
from fedcat.models.nets import NETS
from fedcat.selection import SELECTORS
from fedcat.simulation import Record, Simulation, run_together
from fedcat.version import __version__

__all__ = [
    "DATASETS",
    "METHODS",
    "NETS",
    "PARTITIONS",
    "SELECTORS",
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
