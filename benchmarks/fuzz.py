"""Fuzzing: settings files, command lines and damaged directories that nobody would write, in large numbers.

    OMP_NUM_THREADS=1 python benchmarks/fuzz.py [--files N] [--options N] [--folders N] [--seed S] [--out FILE.json]

A settings file or a command line must give a run, or one line that begins with "error: " and exit code 2. Whatever has
become of a run's directory, `fedcat resume` must do the same, and `fedcat.load_model` return a net or raise a
`SettingError`. Nothing may take longer than `LIMIT` seconds, and nothing in a file may run code. All that happens
besides is printed, each kind once with the shortest input that shows it, and the exit code is then 1.

Inputs are made from the settings, the registries and the commands, so that what is added there is tried as well. Runs
are on the digits, with few clients, and are stopped after `STEPS` steps. With the defaults, 2,000 files, 2,000 command
lines and 500 directories, it takes about 15 minutes on one core.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import numpy as np
import torch
import typer
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import fedcat
from fedcat.cli import app as commands
from fedcat.config.layers import LISTS, OPTION_TABLES, REGISTRIES, option_settings
from fedcat.config.settings import TABLES, Settings, value_type
from fedcat.core.errors import SettingError
from fedcat.core.options import Bounds, declarations, options
from fedcat.data.files.download import DownloadError
from fedcat.runs.driver import Driver
from fedcat.runs.state import load_state, save_state

LIMIT, STEPS, MEMORY = 30, 2, 32 << 30  # seconds of a command, steps of a run, bytes that the process may ask for
BASE = {"dataset": "digits", "clients": 4, "rounds": 2, "epochs": 1, "batch_size": 100, "per_round": 2}
LONG = {"partition_tries", "iterations", "generator_steps", "local_steps", "epochs", "seeds"}
"""Numbers that let a run take as long as its user likes: only small ones are tried."""
KNOWN = {  # texts that mean something to a setting; the module `mark` must never be imported
    "checkpoint_every": ["1r", "60s", "0.01m", "never", "0s", "1.5r", "9" * 400 + "r", "9" * 400 + "h"],
    "data_dir": ["", ".", "~", "~nobody", "no/such", "\0"],
    "device": ["cpu", "auto", "cpu:0", "cpu:7", "meta", "cuda:99", "mps", "\n"],
    "evaluate": [["mean"], ["copies"], ["average"], []],
    "method": ["mark:run"],
    "metrics": [["mark:run"], ["macro-f1", "macro-f1"]],
    "monitor": ["", "accuracy", "loss", "macro-f1", "top5"],
    "net": ["mlp", "cnn", "mark:run", "mark:", ":", "<net>"],
    "preset": ["", "", "lab", "paper"],
}
TEXTS = ["", " ", "\x1b[2J", "a\nb", "\u2028", "\x7f", "'", '"', "%s", "{}", "[red]", "a=", "../x", "-1", "nan", "--"]
TEXTS += [
    "9" * 30,
    "\udcff",
    "1e400",
    "[1",
    "{a=1}",
    "a=b=c",
    "2020-01-01",
    ":",
    "a:b:c",
    ".:x",
    "1,2",
    "x" * 300,
    "9" * 5000,
]
NUMBERS = [2**31, 2**63 - 1, 2**63, 10**30, 0, -1, -(2**63) - 1, 5e-324, 1e308, -1.5, math.nan, math.inf, True]
SHAPES: list[Any] = [[], {}, [1], ["a", "a"], [[]], [{}], {"a": {}}, {"a": {"b": 1}}, {"fedcat": 1}, {"": 0}]
DATES: list[Any] = [datetime.date(2020, 1, 1), datetime.time(1, 2), datetime.datetime(2020, 1, 1, 1, 1)]
large = st.sampled_from([400, 5000]).map(lambda digits: 10**digits)  # it fits no float, or is not even shown
shapes = st.sampled_from([*SHAPES, *DATES]).map(deepcopy)
junk = st.sampled_from(NUMBERS) | large | st.sampled_from(TEXTS) | shapes | st.text(max_size=4)


class HangError(BaseException):
    """A command took too long, or a run is cut short."""


def number(kind: type, bounds: Bounds | None, name: str) -> st.SearchStrategy[Any]:
    """Return numbers within bounds: usual ones, and extremes."""
    within = bounds or Bounds()
    if kind is int:
        least = int(within.at_least or 0)
        many = [n for n in NUMBERS[:4] if n in within and name not in LONG]
        return st.sampled_from([*[n for n in range(least, least + 4) if n in within] * 3, *many])
    usual = st.sampled_from([n for n in (0.0, 0.1, 0.5, 0.9, 1.0, 2.0) if n in within])
    return usual | usual | usual | st.floats(-1e308, 1e308).filter(lambda n: n in within)


def fitting(name: str) -> st.SearchStrategy[Any]:
    """Return values that fit a setting's type and bounds; most of them are right."""
    about, kind, known = Settings.__dataclass_fields__[name].metadata, value_type(name), KNOWN.get(name, [])
    parts = [part for part, _ in REGISTRIES.get(name, LISTS.get(name, ()))]
    if name in LISTS:
        return st.lists(st.sampled_from(parts), max_size=2) | st.sampled_from([*known, []])
    if parts:
        return st.sampled_from([*(["digits"] * 20 if name == "dataset" else []), *parts * 3, *known])
    if kind is bool or known or about["choices"]:
        return st.booleans() if kind is bool else st.sampled_from(known or about["choices"])
    return number(kind or int, about["bounds"], name)


def option(factory: Any, name: str) -> st.SearchStrategy[Any]:
    """Return values that fit an option of a part; of a text, also others."""
    default = options(factory)[name]
    if isinstance(default, (bool, str, tuple)):
        return st.booleans() if isinstance(default, bool) else st.just(default) | junk
    return number(type(default), declarations(factory)[name].bounds, name)


@st.composite
def settings_files(draw: st.DrawFn) -> bytes:
    """Return the content of a settings file; nearly half of them are valid."""
    plain = [field.name for field in fields(Settings) if field.name not in TABLES]
    values = {**BASE, **{name: draw(fitting(name)) for name in draw(st.lists(st.sampled_from(plain), max_size=5))}}
    tables = [*[("method", "options")] * 3, *(entry[:2] for entry in OPTION_TABLES)]
    for setting, table in draw(st.lists(st.sampled_from(tables), max_size=2)):
        part = values[setting] = draw(st.sampled_from([name for name, _ in REGISTRIES[setting]]))
        factory = REGISTRIES[setting].get(part)
        names = draw(st.lists(st.sampled_from([*options(factory)]), max_size=3)) if options(factory) else []
        chosen = {name: draw(option(factory, name)) for name in names}
        values[table] = {part: chosen} if table == "options" else chosen
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        known = st.sampled_from([*plain, *TABLES, *option_settings(), "k", "epsilon"])
        name = draw(known if draw(st.integers(0, 9)) else st.text(max_size=4))
        where = draw(st.sampled_from([values, values, *(one for one in values.values() if isinstance(one, dict))]))
        where[name] = draw(junk.filter(lambda value, long=name in LONG: not (long and isinstance(value, int))))
    content = toml_text(values)
    if draw(st.integers(0, 14)) == 7:  # no longer TOML, or other TOML
        content = content[: draw(st.integers(0, len(content)))] + draw(st.sampled_from([b"", b"\xff", b"[options]\n"]))
    return content


def toml_text(values: dict[str, Any]) -> bytes:
    """Return a table as TOML; lone surrogates become bytes that are not UTF-8."""
    return "".join(f"{_toml(k)} = {_toml(v)}\n" for k, v in values.items()).encode(errors="surrogatepass")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(name)} = {_toml(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int) and value > 10**100:
        return hex(value)
    return str(value).lower() if isinstance(value, (bool, float)) else str(value)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Return the arguments of a command; `all`, `one` and `x.toml` are a comparison, a run and a settings file."""
    words = draw(st.sampled_from([*[["run"], ["compare"]] * 3, ["resume"], ["list"], ["plot"], ["data", "show"]]))
    found: Any = typer.main.get_command(commands.app)
    for word in words:
        found = found.commands[word]
    trains, nested = words[0] in ("run", "compare"), option_settings()
    given = {name: [f"--{name.replace('_', '-')}", str(value)] for name, value in BASE.items() if trains}
    given |= {"seeds": ["--seeds", "1"]} if words == ["compare"] else {}
    text = st.sampled_from(TEXTS) | st.text(st.characters(exclude_characters="\0"), max_size=5)
    parts = [registry.get(part) for registry in (REGISTRIES["method"], REGISTRIES["dataset"]) for part, _ in registry]
    names = [*dict.fromkeys(name for part in parts for name in options(part)), *nested, "lr", "seed", "scaffold.clip"]
    flags = [p for p in found.params if p.param_type_name == "option" and p.name != "help"]
    for flag in draw(st.lists(st.sampled_from(flags), max_size=3)) if flags else []:
        value: Any = draw(st.sampled_from(["accuracy", "bytes", "1", "2", "fedavg,scaffold", "x.svg"]))
        if flag.name in Settings.__dataclass_fields__ or flag.name in nested:
            value = draw(st.sampled_from([0, 1, 0.5, 0.1, 2]) if flag.name in nested else fitting(flag.name))
            value = ",".join(value) if isinstance(value, list) else str(value)
            value = value.replace("\0", "").replace("mark", "math")  # what the user names may be imported
        elif flag.name == "sweep" or "option" in flag.name:
            value = (
                f"{draw(st.sampled_from(names))}={draw(st.sampled_from(['1', '0.1', '1,2', 'true', 'x', '', 'nan']))}"
            )
        spoilt = draw(text) if draw(st.integers(0, 9)) == 0 else value
        pair = [draw(st.sampled_from([*flag.opts, *flag.secondary_opts])), value if spoilt.isdigit() else spoilt]
        given[flag.name] = pair[:1] if getattr(flag, "is_flag", False) else pair
    usual = {"run": "x.toml", "compare": "x.toml", "list": ".", "data": "digits", "plot": "all"}.get(words[0], "one")
    end = draw(text) if draw(st.integers(0, 9)) == 0 else draw(st.sampled_from([*[usual] * 9, "one", "no/such"]))
    ends = [end] if not trains or draw(st.booleans()) else []
    return [*words, *(word for pair in given.values() for word in pair), *ends]


CODE = [rf"(?m)^({name}) = .*$".encode() for name in (*REGISTRIES, *LISTS)]
EXTRA = [".lock", "comparison.json", "clients.json", "average.safetensors", "x.safetensors", "run.json", "checkpoint"]
CONTENTS: dict[str, Callable[[random.Random, bytes, bytes], bytes]] = {  # by what was there, and by another file
    "truncate": lambda draw, old, other: old[: draw.randrange(len(old) + 1)],
    "flip": lambda draw, old, other: (
        old[:99] + bytes(byte ^ 1 << draw.randrange(8) for byte in old[99:100]) + old[100:]
    ),
    "empty": lambda draw, old, other: b"",
    "swap": lambda draw, old, other: other,
    "random": lambda draw, old, other: draw.randbytes(draw.randrange(300)),
    "pickle": lambda draw, old, other: b"cmark\nrun\n.",
    "code": lambda draw, old, other: re.sub(draw.choice(CODE), rb'\1 = "mark:run"', old),
}
KINDS = [*CONTENTS, "delete", "folder", "nowhere", "extra", *["values"] * 12]
damaged_folders = st.tuples(
    st.sampled_from(["fedcat", "scaffold", "one", "all", "cut"]),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**32 - 1)), min_size=1, max_size=2),
    st.sampled_from([[], [], ["--rounds", "5"]]),
)


def damage(folder: Path, kind: str, seed: int) -> str:
    """Damage a file of a directory, and say what was done."""
    draw = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and (kind != "code" or path.suffix == ".toml"))
    if not files:
        return "nothing is left"
    file, other = draw.choice(files), draw.choice(files).read_bytes()
    file = file.with_name(draw.choice(EXTRA)) if kind == "extra" else file
    said = f"{kind} {file.relative_to(folder)}"
    if kind == "values":
        with suppress(ValueError, TypeError, SafetensorError):  # damaged before
            return f"{said}: {change_values(file, draw)}"
    elif kind in CONTENTS:
        file.write_bytes(CONTENTS[kind](draw, file.read_bytes(), other))
    else:
        file = draw.choice([file, file, file.parent]) if file.parent.name == "checkpoint" else file
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
        if kind in ("folder", "extra"):
            file.mkdir() if kind == "folder" or draw.random() < 0.5 else file.write_bytes(other)
        elif kind == "nowhere":
            file.symlink_to(draw.choice(["no/such", file.name]))
    return said


def change_values(file: Path, draw: random.Random) -> str:
    """Change a value of a file so that the file itself is sound; say which."""
    if file.suffix == ".safetensors":
        saved = file.parent.name == "checkpoint"
        said = change(state := load_state(file, "cpu") if saved else load_file(file), draw)
        save_state(file, state) if saved else save_file(state, file)
    elif file.suffix == ".toml":
        said = change(values := tomllib.loads(file.read_text()), draw)
        file.write_bytes(toml_text(values))
    else:
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        place = draw.randrange(len(lines))
        said = change(inner := [json.loads(lines[place])], draw)
        lines[place : place + 1] = map(json.dumps, inner)
        file.write_text("\n".join(lines) + "\n")
    return said


def change(inside: Any, draw: random.Random, path: str = "") -> str:
    """Change, remove or add one value somewhere inside of tables and lists; say which."""
    keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
    if not keys or draw.random() < 0.03:
        inside.update({"x": 1}) if isinstance(inside, dict) else inside.append(1)
        return f"{path} has one more"
    key = "state" if "state" in keys and draw.random() < 0.7 else draw.choice(keys)
    value, path = inside[key], f"{path}[{key!r}]"
    if isinstance(value, (dict, list)) and value and draw.random() < 0.95:
        return change(value, draw, path)
    if draw.random() < 0.1:
        del inside[key]
        return f"{path} is gone"
    if isinstance(value, (torch.Tensor, np.ndarray)) and draw.random() < 0.8:
        old = torch.as_tensor(value)
        ways = [
            old.reshape(-1)[:0],
            old.reshape(-1)[:1],
            old[None],
            old.double(),
            old.bool(),
            old.int(),
            old * math.nan,
        ]
        new = draw.choice([*ways, old * 0 - 7, torch.tensor(1.0)])
        inside[key] = new.numpy() if isinstance(value, np.ndarray) else new
        return f"{path} = {new.dtype} of shape {tuple(new.shape)}"
    near = [value + 1, -value, value * 10**6] if isinstance(value, (int, float)) else []
    inside[key] = deepcopy(draw.choice([*near, *near, None, *TEXTS[:5], *NUMBERS, *SHAPES]))
    return f"{path} = {inside[key]!r}"


class Fuzz:
    """Tries inputs in a directory of its own, and collects what became of them."""

    def __init__(self, work: Path) -> None:
        self.work, self.made, self.here = work, work / "made", work / "here"
        self.counts, self.messages = Counter[str](), Counter[str]()
        self.failures: dict[str, dict[str, Any]] = {}
        (work / "mark.py").write_text("def run(): pass\n")
        common: dict[str, Any] = {**BASE, "rounds": 4, "checkpoint_every": "1r", "threads": 1}
        with warnings.catch_warnings(action="ignore"), chdir(work):
            fedcat.run(method="fedcat", per_client=True, out="made/fedcat", **common)
            fedcat.run(method="scaffold", average=0.9, validation=0.1, out="made/scaffold", **common)
            fedcat.compare(["fedavg", "fedcat"], 2, out="made/all", **common)
            with suppress(HangError):
                fedcat.run(method="fedcat", evaluate=["mean"], out="made/one", callbacks=[Cut()], **common)
            with suppress(HangError):
                fedcat.compare(["fedgen", "clusamp"], 1, out="made/cut", callbacks=[Cut()], **common)

    def file(self, content: bytes) -> None:
        """Run a settings file."""
        (self._fresh() / "x.toml").write_bytes(content)
        self._judge("file", content, lambda: command(["run", "x.toml"]))

    def line(self, words: list[str]) -> None:
        """Run a command line."""
        (self._fresh() / "x.toml").write_bytes(toml_text(BASE))
        for name in {"all", "one"} & set(words):
            shutil.copytree(self.made / name, self.here / name)
        self._judge("line", words, lambda: command(words))

    def folder(self, given: tuple[str, list[tuple[str, int]], list[str]]) -> None:
        """Damage a directory, and try what reads one."""
        name, hits, more = given
        folder = self._fresh() / "x"
        shutil.copytree(self.made / name, folder)
        seen = [name, *(damage(folder, *hit) for hit in hits), *more, hits]
        for run in [folder, *(path for path in folder.iterdir() if path.is_dir() and path.name != "checkpoint")]:
            for model in ("global", "average"):
                self._judge("load_model", [*seen, run.name], lambda run=run, model=model: load(run, model))
        self._judge("list", seen, lambda: command(["list", "x"]))
        if hits[0][1] % 4 == 0:
            self._judge("plot", seen, lambda: command(["plot", "x", "--out", "x.svg"]))
        self._judge("resume", seen, lambda: command(["resume", "x", *more]))

    def _fresh(self) -> Path:
        shutil.rmtree(self.here, ignore_errors=True)
        self.here.mkdir()
        return self.here

    def _judge(self, kind: str, given: Any, call: Callable[[], str]) -> None:
        """Call a function in the work directory, and note whether it kept the promise."""
        path, key = mock.patch.object(sys, "path", [*sys.path, str(self.work)]), ""
        try:
            with chdir(self.here), guarded(), warnings.catch_warnings(), path:
                warnings.simplefilter("default")
                try:
                    wrong = call()
                except SettingError as error:
                    wrong = str(error) if "\n" not in str(error) else f"wrong: more than a line: {error}"
            self.messages[re.sub(r"'[^']*'|\"[^\"]*\"|[\d.,+-]+", "*", wrong)[:70]] += 1
            key = wrong if wrong.startswith("wrong: ") else ""
        except (Exception, HangError) as error:
            wrong = "".join(traceback.format_exception(error, limit=-6))
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "fedcat" in Path(f.filename).parts]
            key = f"{type(error).__name__} at " + (
                f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            )
        if sys.modules.pop("mark", None):
            wrong = key = "wrong: what a file names was imported"
        self.counts[f"{kind}: {'failure' if key else 'error' if wrong else 'valid'}"] += 1
        if key:
            known = self.failures.setdefault(f"{kind}, {key[:150]}", {"times": 0, "input": given, "wrong": wrong})
            known["times"] += 1
            if len(repr(given)) < len(repr(known["input"])):
                known |= {"input": given, "wrong": wrong}

    def report(self) -> str:
        """Return what was found as text."""
        lines = [f"{name}: {count:,}" for name, count in sorted(self.counts.items())]
        lines += ["most common messages:", *(f"{n:6} {text}" for text, n in self.messages.most_common(25) if text)]
        for key, found in self.failures.items():
            lines += ["", f"{key} ({found['times']} times)", f"input: {found['input']!r}", found["wrong"]]
        return "\n".join([*lines, f"distinct failures: {len(self.failures)}"])


def load(folder: Path, model: str) -> str:
    """Load a model; return an empty text."""
    fedcat.load_model(folder, model=model)
    return ""


class Cut(fedcat.Callback):
    """Ends a run as a kill does, in mid-cycle."""

    def on_round(self, run: Any, record: Any) -> None:
        """End the run after its third round."""
        if record.round == 3:
            raise HangError


def command(words: list[str]) -> str:
    """Run a command line; return its error line, an empty text after a run, or what is wrong with its output."""
    err, code = io.StringIO(), None
    with mock.patch.object(sys, "argv", ["fedcat", *words]), redirect_stdout(io.StringIO()), redirect_stderr(err):
        try:
            commands.main()
        except SystemExit as end:
            code = end.code
    *notes, line = err.getvalue().removesuffix("\n").split("\n")
    if code == 0 or (code == 1 and re.search("no hop arrived|not completely written", err.getvalue())):
        return ""
    if code == 2 and line.startswith("error: ") and all(note.startswith("note: ") for note in notes):
        return line if line.isprintable() else f"wrong: control characters: {line!r}"
    return f"wrong: exit code {code}: {err.getvalue()[-300:]!r}"


@contextmanager
def guarded() -> Iterator[None]:
    """Limit time and memory, stop runs after a few steps, and download nothing."""
    original, size = Driver.run, resource.getrlimit(resource.RLIMIT_AS)

    def run(driver: Driver, between: Callable[[], None] | None = None) -> None:
        left = iter(range(STEPS - 1, -1, -1))

        def after() -> None:
            for one in [] if next(left, 0) else driver.active:
                one.stop()
            if between is not None:
                between()

        original(driver, after)

    def late(*_: object) -> None:
        raise HangError(f"more than {LIMIT} s")

    offline = mock.patch("fedcat.data.files.download._fetch_from", side_effect=DownloadError("offline"))
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, size[1]))
    faulthandler.dump_traceback_later(10 * LIMIT, exit=True)  # if not even a signal gets through
    signal.alarm(LIMIT)
    try:
        with mock.patch.object(Driver, "run", run), offline, mock.patch.dict(os.environ, {"XDG_CACHE_HOME": "cache"}):
            yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, size)
        signal.signal(signal.SIGALRM, before)


def explore(strategy: st.SearchStrategy[Any], call: Callable[[Any], None], count: int, seed: int = 0) -> None:
    """Call a function with so many examples."""

    def one(value: Any) -> None:
        call(value)

    plain = {"phases": [hypothesis.Phase.generate], "suppress_health_check": list(hypothesis.HealthCheck)}
    chosen = hypothesis.settings(max_examples=max(1, count), deadline=None, database=None, **plain)
    if count:
        hypothesis.seed(seed)(chosen(hypothesis.given(strategy)(one)))()


def start() -> int:
    """Fuzz as the command line says."""
    parser = argparse.ArgumentParser(description="Fuzz settings files, command lines and directories of runs.")
    for name, default in (("files", 2000), ("options", 2000), ("folders", 500), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        fuzz = Fuzz(Path(work).resolve())
        explore(settings_files(), fuzz.file, given.files, given.seed)
        explore(command_lines(), fuzz.line, given.options, given.seed)
        explore(damaged_folders, fuzz.folder, given.folders, given.seed)
    print(fuzz.report())
    if given.out is not None:
        found = {"counts": fuzz.counts, "messages": fuzz.messages, "failures": fuzz.failures}
        given.out.write_text(json.dumps(found, indent=1, default=repr))
    return 1 if fuzz.failures else 0


if __name__ == "__main__":
    sys.exit(start())
