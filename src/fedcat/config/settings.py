"""Settings: the fields, each with its default, help, panel and bounds, and the checks that involve several of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

from fedcat.config.schedules import SCHEDULES
from fedcat.config.toml import toml
from fedcat.core.errors import SettingError, unknown_name
from fedcat.core.options import TYPE_NAMES, Bounds, Typed
from fedcat.core.precision import PRECISIONS
from fedcat.engines import NAMES as ENGINES
from fedcat.protocol.faults import KINDS, parse_straggler

DTYPES = ("float32", "float64")
SAMPLINGS = ("shuffle", "replacement")
ON_COLLAPSE = ("warn", "stop", "restore")
TABLES = (
    *("dataset_options", "partition_options", "optimizer_options", "aggregator_options", "server_options"),
    "options",
)
"""Settings that are tables of options."""

DATA, METHOD, SERVER = "Data", "Method", "Server"
LOCAL, SCHEDULE, EVALUATION, MACHINE = "Local training", "Learning rate schedule", "Evaluation", "Machine"
FAULTS, GUARDS = "Simulated faults", "Guards"

POSITIVE = Bounds(above=0)
SHARE = Bounds(at_least=0, at_most=1)
COUNT = Bounds(at_least=1)
PROCESSES = Bounds(at_least=1, at_most=4096)
AMOUNT = Bounds(at_least=1, at_most=10**9)
SEED = Bounds(at_least=0, below=2**63)


def _setting(
    default: Any,
    panel: str,
    help: str,
    bounds: Bounds | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str = "",
) -> Any:
    """Declare a setting: its default, the panel of ``--help`` that shows it, a line of help, and what is allowed."""
    metadata = {"panel": panel, "help": help, "bounds": bounds, "choices": choices, "metavar": metavar}
    if isinstance(default, (list, dict)):
        return field(default_factory=type(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Everything that a user can set about a run. `fedcat.config.resolve` makes complete, checked ones."""

    preset: str = _setting("", METHOD, "settings to start from: lab or paper, see `fedcat presets`")
    method: str = _setting("fedcat", METHOD, "the method, see `fedcat methods`, or module:Class")
    dataset: str = _setting("digits", DATA, "the dataset, see `fedcat data list`, or module:function")
    data_dir: str = _setting("", DATA, "directory to search for the files first, before FEDCAT_DATA and the user cache")
    net: str = _setting("", LOCAL, "the net, see `fedcat nets`, or module:function; default: the dataset's own")
    loss: str = _setting(
        "", LOCAL, "the loss per sample, see `fedcat training`, or module:function; default: cross-entropy"
    )
    partition: str = _setting(
        "dirichlet", DATA, "how to divide the data over clients, see `fedcat data list`, or module:function"
    )
    min_samples: int = _setting(10, DATA, "minimum number of samples per client", COUNT)
    partition_tries: int = _setting(1000, DATA, "how many partitions to draw before giving up on min_samples", COUNT)
    clients: int = _setting(100, METHOD, "number of clients, N", COUNT)
    fraction: float = _setting(0.1, METHOD, "fraction of the clients that train per round", Bounds(above=0, at_most=1))
    per_round: int | None = _setting(None, METHOD, "clients per round, K; default: fraction * clients", COUNT)
    rounds: int = _setting(1000, METHOD, "number of rounds", AMOUNT)
    epochs: int = _setting(5, LOCAL, "local epochs, each time a client trains", AMOUNT)
    batch_size: int = _setting(50, LOCAL, "local batch size", COUNT)
    sampling: str = _setting(
        "shuffle",
        LOCAL,
        "how batches are drawn: shuffle (every sample once per epoch) or replacement (independently)",
        choices=SAMPLINGS,
    )
    optimizer: str = _setting(
        "sgd", LOCAL, "the local optimizer, fresh each time a client trains: sgd, adam, adamw, or module:Class"
    )
    augment: list[str] = _setting(
        [], LOCAL, "random changes of training inputs, see `fedcat training`, or module:function"
    )
    lr: float = _setting(0.01, LOCAL, "learning rate of local training", POSITIVE)
    lr_schedule: str = _setting(
        "constant", SCHEDULE, f"learning rate over rounds: {', '.join(SCHEDULES)}", choices=SCHEDULES
    )
    lr_decay: float = _setting(
        0.5,
        SCHEDULE,
        "step: the factor; inverse: the decay per round; inverse-step: per local step",
        Bounds(at_least=0),
    )
    lr_every: int = _setting(100, SCHEDULE, "step: rounds between two decays", COUNT)
    momentum: float = _setting(
        0.5, LOCAL, "momentum of local SGD, reset each time a client trains", Bounds(at_least=0, below=1)
    )
    weight_decay: float = _setting(0.0, LOCAL, "weight decay of local training", Bounds(at_least=0))
    clip: float | None = _setting(None, LOCAL, "largest norm of a local gradient; default: no clipping", POSITIVE)
    dropout: float = _setting(
        0.0, FAULTS, "probability that a client gets the model and sends nothing back, each time it trains", SHARE
    )
    straggler: str = _setting(
        "", FAULTS, "share of slow clients, and how many times as long they take: 0.2,5", metavar="SHARE,FACTOR"
    )
    deadline: float | None = _setting(
        None, FAULTS, "simulated seconds after which a client's reply is too late; default: none is", POSITIVE
    )
    step_seconds: float = _setting(0.01, FAULTS, "simulated seconds per local step", POSITIVE)
    bandwidth: float = _setting(1.0, FAULTS, "simulated MB per second of a client, in both directions", POSITIVE)
    corrupt: float = _setting(0.0, FAULTS, "probability that a reply is corrupt", SHARE)
    corrupt_kinds: list[str] = _setting([], FAULTS, f"how: {', '.join(KINDS)}; default: each equally often")
    flip: float = _setting(0.0, FAULTS, "share of the clients that always turn the sign of their change", SHARE)
    bound: float | None = _setting(
        None, GUARDS, "largest norm of a client's update that the server accepts; default: any", POSITIVE
    )
    guard: bool = _setting(
        False, GUARDS, "refuse clients whose updates point against the others', or are 10 times as long, hop by hop"
    )
    ban_after: int | None = _setting(
        None, GUARDS, "refused replies after which a client is not selected any more; default: never", COUNT
    )
    on_collapse: str = _setting(
        "warn",
        GUARDS,
        "if the model falls back to chance or is not finite: warn, stop, or restore (go back to the last good one)",
        choices=ON_COLLAPSE,
    )
    aggregator: str = _setting(
        "", SERVER, "how models become one: mean, median, ... or module:function, see `fedcat methods`; default: mean"
    )
    server_optimizer: str = _setting(
        "",
        SERVER,
        "server optimizer: mean, momentum, adam or module:Class, see `fedcat methods`; default: the method's own",
    )
    average: float | None = _setting(
        None,
        SERVER,
        "also keep and evaluate an average of the model over rounds: exponential with this decay, such as 0.95, or, "
        "from 1 on, with weights that grow with this power of the round",
        Bounds(at_least=0, at_most=20),
    )
    selector: str = _setting(
        "", METHOD, "client selection, see `fedcat methods`, or module:function; default: the method's own"
    )
    seed: int = _setting(0, MACHINE, "random seed", SEED)
    data_seed: int | None = _setting(
        None, DATA, "seed of the partition and of the dataset's own draws; default: seed", SEED
    )
    evaluate_every: int | None = _setting(
        None,
        EVALUATION,
        "rounds between evaluations; the last round is always evaluated; default: the first multiple of K from 10 on",
        COUNT,
    )
    evaluate: list[str] = _setting(
        [], EVALUATION, "further models to evaluate, of those that the method offers, see `fedcat methods`"
    )
    metrics: list[str] = _setting([], EVALUATION, "further metrics to record, see `fedcat metrics`, or module:function")
    monitor: str = _setting(
        "", EVALUATION, "metric by which models are compared; default: accuracy, or the loss if there are no classes"
    )
    client_test: float = _setting(
        0.0, EVALUATION, "fraction of every client's data to keep as its own test set", Bounds(at_least=0, below=1)
    )
    validation: float = _setting(
        0.0,
        EVALUATION,
        "fraction of every client's training data to keep for choosing models and numbers",
        Bounds(at_least=0, below=1),
    )
    per_client: bool = _setting(
        False, EVALUATION, "at the end, also evaluate on each client's own data: its test set, else its training data"
    )
    engine: str = _setting("auto", MACHINE, f"how clients train: {', '.join(ENGINES)}", choices=ENGINES)
    device: str = _setting("auto", MACHINE, "PyTorch device: auto, cpu, cuda, cuda:0, ...")
    dtype: str = _setting("float32", MACHINE, "floating-point type: float32 or float64", choices=DTYPES)
    precision: str = _setting(
        "fp32", MACHINE, "precision of matrix products in training: fp32, bf16, or on a GPU tf32", choices=PRECISIONS
    )
    memory: float | None = _setting(
        None,
        MACHINE,
        "GPU memory in GB; train fewer models at once to stay below it; default: what is free",
        POSITIVE,
    )
    exact: bool | None = _setting(
        None, MACHINE, "same bits no matter what else runs in the comparison; default: on for a CPU, where it is cheap"
    )
    threads: int | None = _setting(None, MACHINE, "PyTorch threads on a CPU; default: PyTorch's choice", PROCESSES)
    workers: int | None = _setting(
        None, MACHINE, "training processes on a CPU, one thread each; default: as many as threads", PROCESSES
    )
    checkpoint_every: str = _setting(
        "60s",
        MACHINE,
        "how often to save the state that `fedcat resume` continues from: 60s, 5m, 2h, 10r (rounds) or never",
        metavar="TIME",
    )
    dataset_options: dict[str, Any] = _setting({}, DATA, "options of the dataset")
    partition_options: dict[str, Any] = _setting({}, DATA, "options of the partition")
    optimizer_options: dict[str, Any] = _setting({}, LOCAL, "options of the local optimizer")
    aggregator_options: dict[str, Any] = _setting({}, SERVER, "options of the aggregator")
    server_options: dict[str, Any] = _setting({}, SERVER, "options of the server optimizer")
    options: dict[str, dict[str, Any]] = _setting({}, METHOD, "options of methods, by method")

    @property
    def k(self) -> int:
        """K, the number of clients per round."""
        return self.per_round or max(1, round(self.fraction * self.clients))

    @property
    def evaluation_interval(self) -> int:
        """Rounds between evaluations: by default a multiple of K, because FedCat aggregates every K rounds."""
        return self.evaluate_every or self.k * -(-10 // self.k)

    @property
    def partition_seed(self) -> int:
        """The seed of the partition and of the dataset's own draws."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def slow_clients(self) -> tuple[float, float]:
        """The share of slow clients, and how many times as long they take."""
        try:
            return parse_straggler(self.straggler)
        except ValueError:
            raise SettingError(
                f"straggler must be a share from 0 to 1 and a factor of at least 1, such as 0.2,5, "
                f"got {self.straggler!r}"
            ) from None

    @property
    def checkpoint_interval(self) -> tuple[float, int]:
        """Seconds and rounds between checkpoints, of which one is set; the other is infinite or 0."""
        if self.checkpoint_every == "never":
            return math.inf, 0
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhr])", self.checkpoint_every)
        count, unit = (float(found[1]), found[2]) if found else (0.0, "")
        if count <= 0 or (unit == "r" and not count.is_integer()):
            raise SettingError(
                f"checkpoint_every must be a time such as 60s, 5m or 2h, a number of rounds such as 10r, or never, "
                f"got {self.checkpoint_every!r}"
            )
        return (math.inf, int(count)) if unit == "r" else (count * {"s": 1, "m": 60, "h": 3600}[unit], 0)

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Settings:
        """Return settings with these values over the defaults, or raise a `SettingError` for the first bad one."""
        hints = get_type_hints(cls)
        known = {f.name: f for f in fields(cls)}
        ready = {}
        for name, value in values.items():
            if name not in known:
                raise unknown_name("setting", name, known)
            ready[name] = _fitted(name, value, hints[name])
            _check_value(name, ready[name], known[name].metadata)
        made = cls(**ready)
        made._check_together()
        return made

    def _check_together(self) -> None:
        """Check what involves several settings or the entries of tables."""
        if self.per_round is not None and self.per_round > self.clients:
            raise SettingError(
                f"per_round must be at least 1 and at most the {self.clients} clients, got {self.per_round}"
            )
        if self.precision != "fp32" and self.dtype != "float32":
            raise SettingError(f"precision must be fp32 if dtype is float64, got {self.precision!r}")
        _ = self.checkpoint_interval, self.slow_clients
        for kind in self.corrupt_kinds:
            if kind not in KINDS:
                raise unknown_name("corrupt_kinds", kind, KINDS)
        for setting in TABLES:
            for name in getattr(self, setting):
                if not isinstance(name, str):
                    raise SettingError(f"{setting} must have strings as keys, got {name!r}")
        for method, table in self.options.items():
            if not isinstance(table, dict):
                raise SettingError(f"options of method {method!r} must be a table, got {table!r}")

    def toml(self) -> str:
        """Return the settings as the text of a TOML file; settings that are None are left out."""
        return toml(asdict(self))


def value_type(name: str) -> type | None:
    """Return the type of a setting's values, or None if there is no such setting."""
    hint = get_type_hints(Settings).get(name)
    return None if hint is None else _type_of(hint)


def _type_of(hint: Any) -> type:
    """Return the type of a hint: int for ``int | None``, list for ``list[str]``."""
    if type(None) in get_args(hint):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    found: type = get_origin(hint) or hint
    return found


def _fitted(name: str, value: Any, hint: Any) -> Any:
    """Return a value in the type of its setting; an integer passes for a number."""
    kind = _type_of(hint)
    if isinstance(value, Typed):
        value = value.read(kind)
    if value is None and type(None) in get_args(hint):
        return None
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (isinstance(value, str) and not _encodable(value)):
        raise SettingError(f"{name} must be {TYPE_NAMES[kind]}, got {value!r}")
    return value


def _check_value(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    if value is not None and metadata["bounds"] is not None:
        metadata["bounds"].check(name, value)
    if metadata["choices"] is not None and value not in metadata["choices"]:
        raise unknown_name(name, value, metadata["choices"])


def _encodable(text: str) -> bool:
    """Tell whether a string can be written to a file; a file name with undecodable bytes cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
