"""What to run: settings, checked in one place, and their TOML form."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from fedcat.config.schedules import SCHEDULES
from fedcat.core.errors import SettingError, unknown
from fedcat.core.options import WORDS, plain_values
from fedcat.core.precision import PRECISIONS
from fedcat.engines import NAMES as ENGINES

DTYPES = ("float32", "float64")
EXTRA_MODELS = ("mean", "copies")


def _is(default: Any, help: str) -> Any:
    """Declare a setting with its default and the line that explains it."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run's numbers, and where they go."""

    preset: str = _is("", "a named set of settings under those that are given: lab or paper, see `fedcat presets`")
    method: str = _is("fedcat", "the method, see `fedcat methods`, or module:Class")
    dataset: str = _is("digits", "the dataset, see `fedcat data list`, or module:function")
    data_dir: str = _is(
        "", "where to look for the dataset's files first; then in FEDCAT_DATA, then in the user's cache"
    )
    net: str = _is("", "the net, see `fedcat nets`, or module:function; by default the dataset's own")
    partition: str = _is("dirichlet", "how the data is divided over devices, see `fedcat data list`")
    alpha: float = _is(0.5, "concentration of the Dirichlet partitions: the smaller, the more skewed")
    shards: int = _is(2, "shards a device gets in the partition shards")
    min_samples: int = _is(10, "the fewest samples that a device may hold")
    partition_tries: int = _is(1000, "how often to draw the partition before giving up")
    devices: int = _is(100, "the number of devices, N")
    fraction: float = _is(0.1, "the share of the devices that train in a round")
    per_round: int | None = _is(None, "devices in a round, K; by default fraction * devices")
    rounds: int = _is(1000, "rounds to run")
    epochs: int = _is(5, "local epochs of a hop")
    batch_size: int = _is(50, "samples in a local batch")
    lr: float = _is(0.01, "the local step size")
    lr_schedule: str = _is("constant", "how the step size changes over rounds: constant, step, inverse or cosine")
    lr_decay: float = _is(0.5, "step: the factor; inverse: the rate a round")
    lr_every: int = _is(100, "rounds between two decays of the schedule step")
    momentum: float = _is(0.5, "momentum of the local SGD, afresh at each hop")
    weight_decay: float = _is(0.0, "weight decay of the local SGD")
    clip: float | None = _is(None, "the largest norm of a local gradient; by default not clipped")
    bound: float | None = _is(None, "the largest norm of a device's change that the server lets in")
    server: str = _is(
        "", "the server's step: mean, momentum, adam or module:Class, see `fedcat methods`; by default the method's own"
    )
    server_lr: float | None = _is(None, "its step size; by default 1, for adam 0.01")
    server_momentum: float | None = _is(None, "momentum, adam: the first beta; by default 0.9")
    server_beta2: float | None = _is(None, "adam: the second beta; by default 0.99")
    server_tau: float | None = _is(None, "adam: what is added to the root; by default 0.001")
    average: float | None = _is(
        None, "keep an exponential average of the model over rounds with this decay, such as 0.95, and evaluate it too"
    )
    selector: str = _is(
        "", "who trains next: uniform, by-samples, multinomial or module:function; by default the method's own"
    )
    seed: int = _is(0, "seed of all chance")
    data_seed: int | None = _is(None, "seed of the partition and of the dataset's own draws; by default the seed")
    evaluate_every: int = _is(10, "rounds between evaluations; the last round is always evaluated")
    evaluate: list[str] = _is([], "further models to evaluate: mean (of the copies), copies")
    per_device: bool = _is(False, "at the end, also the accuracy on each device's own data")
    engine: str = _is("auto", "how devices train: auto, sequential or stacked")
    device: str = _is("auto", "where: auto, cpu, cuda or cuda:0 and so on")
    dtype: str = _is("float32", "the type of all numbers: float32 or float64")
    precision: str = _is("fp32", "how products are formed in training: fp32, on a GPU also tf32, or bf16")
    memory: float | None = _is(
        None, "GB of the GPU below which stacks are kept by splitting them; by default what is free"
    )
    exact: bool | None = _is(None, "the same bits whatever runs beside it; by default on a CPU, where it costs little")
    threads: int | None = _is(None, "threads that PyTorch uses on the CPU; by default its own choice")
    workers: int | None = _is(
        None, "processes that train on a CPU, each with one thread; by default as many as threads"
    )
    dataset_options: dict[str, Any] = _is({}, "options of the dataset")
    options: dict[str, dict[str, Any]] = _is({}, "options of methods, by method")

    @property
    def k(self) -> int:
        """Devices in a round."""
        if self.per_round is not None:
            return self.per_round
        return max(1, round(self.fraction * self.devices))

    def check(self) -> Settings:
        """Return these settings, or raise a `SettingError` for the first that cannot be used."""
        _types(self)
        for name in ("shards", "min_samples", "partition_tries", "devices", "rounds", "epochs", "batch_size"):
            _need(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("lr_every", "evaluate_every"):
            _need(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("threads", "workers"):
            _need(self, name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in ("alpha", "lr"):
            value = getattr(self, name)
            _need(self, name, value > 0 and math.isfinite(value), "> 0 and finite" if value > 0 else "> 0")
        for name in ("clip", "bound", "memory"):
            value = getattr(self, name)
            _need(self, name, value is None or value > 0, "> 0")
        _need(self, "fraction", 0 < self.fraction <= 1, "> 0 and at most 1")
        if self.per_round is not None:
            right = f"at least 1 and at most the {self.devices} devices"
            _need(self, "per_round", 1 <= self.per_round <= self.devices, right)
        _need(self, "momentum", 0 <= self.momentum < 1, "at least 0 and below 1")
        _need(self, "average", self.average is None or 0 <= self.average < 1, "at least 0 and below 1")
        _need(self, "weight_decay", 0 <= self.weight_decay < math.inf, "at least 0")
        _need(self, "lr_decay", 0 <= self.lr_decay < math.inf, "at least 0")
        _need(self, "seed", 0 <= self.seed < 2**63, "at least 0 and below 2**63")
        seed = self.data_seed
        _need(self, "data_seed", seed is None or 0 <= seed < 2**63, "at least 0 and below 2**63")
        for name, known in (
            ("engine", ENGINES),
            ("dtype", DTYPES),
            ("precision", PRECISIONS),
            ("lr_schedule", SCHEDULES),
        ):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        full = self.precision == "fp32" or self.dtype == "float32"
        _need(self, "precision", full, "fp32 where dtype is float64")
        for method, table in self.options.items():
            if not isinstance(table, dict):
                raise SettingError(f"options of method {method!r} must be a table, got {table!r}")
        for name in self.dataset_options:
            if not isinstance(name, str):
                raise SettingError(f"dataset_options must name options by texts, got {name!r}")
        for model in self.evaluate:
            if model not in EXTRA_MODELS:
                raise unknown("evaluate", model, EXTRA_MODELS)
        return self

    def toml(self) -> str:
        """Return the settings as a TOML file's text; what has no value is left out."""
        return toml(asdict(self))


def toml(values: Mapping[str, Any]) -> str:
    """Return settings by name as a TOML file's text; what has no value is left out."""
    tables = {"dataset_options": values.get("dataset_options") or {}}
    tables |= {f"options.{_toml_key(method)}": table for method, table in values.get("options", {}).items()}
    plain = {name: value for name, value in values.items() if name not in ("dataset_options", "options")}
    lines = _toml_lines(plain)
    for title, table in tables.items():
        if table or title != "dataset_options":
            lines += ["", f"[{title}]", *_toml_lines(table)]
    return "\n".join(lines) + "\n"


def _toml_lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_toml_key(name)} = {_toml_value(value)}" for name, value in table.items() if value is not None]


def make(given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Settings:
    """Make settings of what a user gave, over a dataset's defaults, over the general ones."""
    names = {f.name for f in fields(Settings)}
    below = dict(defaults or {})
    for name in (*below, *given):
        if name not in names:
            raise unknown("setting", name, names)
    if "fraction" in given:
        below.pop("per_round", None)
    return replace(Settings(), **plain_values({**below, **given})).check()


def read_toml(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file; keys are checked later, by `make`."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise SettingError(f"settings file {str(path)!r} does not exist") from error
    except OSError as error:
        raise SettingError(f"settings file {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"settings file {str(path)!r} is not TOML: {error}") from error


def parse(name: str, text: str) -> Any:
    """Read one setting's value from the text that a user typed, such as a sweep's."""
    hint = get_type_hints(Settings).get(name)
    if hint is str:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _need(settings: Settings, name: str, holds: bool, right: str) -> None:
    if not holds:
        raise SettingError(f"{name} must be {right}, got {_shown(getattr(settings, name))}")


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _kind(hint: Any) -> Any:
    """Return the type of a setting's values: of ``int | None`` int, of ``list[str]`` list."""
    if type(None) in get_args(hint):
        return next(k for k in get_args(hint) if k is not type(None))
    return get_origin(hint) or hint


def _types(settings: Settings) -> None:
    """Check each setting's type; a whole number passes for a number."""
    hints = get_type_hints(Settings)
    for entry in fields(Settings):
        value = getattr(settings, entry.name)
        kind = _kind(hints[entry.name])
        if value is None and kind is not hints[entry.name]:
            continue
        if kind is float and type(value) is int:
            object.__setattr__(settings, entry.name, float(value))
        elif type(value) is not kind or (kind is str and not _writable(value)):
            raise SettingError(f"{entry.name} must be {WORDS[kind]}, got {value!r}")


def _writable(text: str) -> bool:
    """Tell whether a text can be written to a file: the name of a file need not be."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _toml_key(name: str) -> str:
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else _toml_value(name)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
