"""Output of the command line: results, tables and lists."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedcat.config.settings import Settings
from fedcat.core.options import options
from fedcat.core.registry import Registry
from fedcat.core.text import plural
from fedcat.data.dataset import DATASETS, dataset_options
from fedcat.data.federation import Federation
from fedcat.data.skew import Skew
from fedcat.methods import declared
from fedcat.models.metrics import Metric
from fedcat.runs.result import Result
from fedcat.runs.summary import Figures
from fedcat.runs.variant_result import SPREAD, VariantResult, mean_std

MOST_SEEDS = 5
"""Seeds whose differences are listed; the mean is over all."""


def say(console: Console, text: str, indent: int = 0) -> None:
    """Print a line; on a terminal it is wrapped between words, with the second and later lines indented."""
    if console.is_terminal and indent:
        text = textwrap.fill(
            text, console.width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )
    console.print(text, markup=False, soft_wrap=not console.is_terminal or bool(indent))


def show_notes(console: Console, notes: Iterable[str]) -> None:
    """Print notes for the user, each once."""
    for note in dict.fromkeys(notes):
        say(console, f"note: {note}")


def show_fields(console: Console, fields: dict[str, str]) -> None:
    """Print names and values, one per line."""
    for name, value in fields.items():
        say(console, f"{name:10}{value}", indent=10)


def describe(settings: Sequence[Settings]) -> str:
    """Return the main settings as text; of several runs, those that all share."""

    def same(words: Callable[[Settings], str]) -> str:
        found = {words(one) for one in settings}
        return found.pop() if len(found) == 1 else ""

    def each(words: Callable[[Settings], str]) -> str:
        """Return what most methods share, and in brackets what others have instead, unless it is swept."""
        found = {one.method: {words(other) for other in settings if other.method == one.method} for one in settings}
        if any(len(texts) > 1 for texts in found.values()):
            return ""
        texts = {method: next(iter(those)) for method, those in found.items()}
        usual = max(texts.values(), key=list(texts.values()).count)
        other = [f"{method}: {text or 'none'}" for method, text in texts.items() if text != usual]
        return usual + (f"{' ' if usual else ''}({', '.join(other)})" if other else "")

    parts = (
        same(lambda s: f"preset {s.preset}" if s.preset else ""),
        same(lambda s: f"net {s.net}"),
        same(lambda s: f"loss {s.loss}" if s.loss else ""),
        same(lambda s: f"augment {', '.join(s.augment)}" if s.augment else ""),
        same(lambda s: f"client test {s.client_test:g}" if s.client_test else ""),
        same(lambda s: f"validation {s.validation:g}" if s.validation else ""),
        same(lambda s: f"partition {describe_partition(s)}"),
        same(lambda s: f"{plural(s.k, 'client')} per round"),
        each(lambda s: plural(s.epochs, "epoch")),
        each(lambda s: f"batch size {s.batch_size}"),
        each(lambda s: f"lr {s.lr:g}"),
        each(lambda s: f"momentum {s.momentum:g}" if s.optimizer == "sgd" else _part("optimizer", s.optimizer, s)),
        each(lambda s: "" if s.clip is None else f"clip {s.clip:g}"),
        each(lambda s: "" if s.average is None else f"average {s.average:g}"),
        same(lambda s: _part("aggregator", s.aggregator, s) if s.aggregator else ""),
        same(_faults),
        same(lambda s: plural(s.rounds, "round")),
    )
    return "; ".join(filter(None, parts))


def _faults(settings: Settings) -> str:
    """Return the simulated faults and the guards as text."""
    numbers = {
        name: getattr(settings, name) for name in ("dropout", "deadline", "corrupt", "flip", "bound", "ban_after")
    }
    words = [f"{name.replace('_', ' ')} {value:g}" for name, value in numbers.items() if value]
    words += [f"straggler {settings.straggler}"] if settings.straggler else []
    return "; ".join([*words, *(["guard"] if settings.guard else [])])


def _part(kind: str, name: str, settings: Settings) -> str:
    """Return a part and its options as text."""
    options: Mapping[str, Any] = getattr(settings, f"{kind}_options")
    return ", ".join([f"{kind} {name}", *(f"{option} {_number(value)}" for option, value in options.items())])


def describe_partition(settings: Settings) -> str:
    """Return the partition and its options as text."""
    return _part("partition", settings.partition, settings).removeprefix("partition ")


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def show_result(console: Console, result: Result, metrics: Mapping[str, Metric]) -> None:
    """Print the result of one run."""
    summary = result.summary
    monitor = metrics[summary.monitor]
    others = {name: summary.figures(name) for name in summary.others if not name.startswith("copy ")}
    further = {name: found for name, found in summary.metrics["global"].items() if name not in (monitor.name, "loss")}
    traffic, relative, chosen = summary.bytes, summary.relative_traffic, summary.chosen
    count = len(result.values())
    fields = {monitor.name: _figures(summary.figures(), monitor, count)}
    fields |= {name: _figures(found, monitor, count) for name, found in others.items()}
    fields |= {name: _figures(found, metrics[name], count) for name, found in further.items()}
    if chosen is not None:
        test = monitor.text(chosen.metrics[monitor.name])
        fields["chosen"] = (
            f"{test} after round {chosen.round}, best on validation data: {monitor.text(chosen.validation)}"
        )
    if monitor.name in summary.client_test:
        fields["clients"] = _spread(summary.client_test[monitor.name], monitor)
    fields["traffic"] = f"{size(traffic['down'])} down, {size(traffic['up'])} up" + (
        "" if relative is None else f", {relative:.2f} times FedAvg"
    )
    if traffic["evaluation"]:
        fields["traffic"] += f"; evaluation on clients {size(traffic['evaluation'])}"
    show_fields(console, {**fields, "time": f"{summary.seconds:.1f} s", "directory": str(result.folder)})


def _figures(found: Figures, metric: Metric, count: int) -> str:
    """Return the figures of a metric after `count` evaluations."""
    if found.final is None:
        return "not finite" if count else "not evaluated"
    if found.best is None or found.last_five is None or count < 2:
        return metric.text(found.final)
    best, last = metric.text(found.best), metric.text(found.last_five)
    return f"{metric.text(found.final)} (best {best}, mean of the {_last(count)} {last})"


def _last(count: int) -> str:
    """Return which evaluations `last_five` is the mean of."""
    return "last five evaluations" if count >= 5 else f"{count} evaluations"


def _spread(found: Mapping[str, float], metric: Metric) -> str:
    mean, weighted, worst, deviation = (metric.text(found[name]) for name in SPREAD)
    return f"mean {mean}, weighted by samples {weighted}, worst tenth {worst}, standard deviation {deviation}"


def show_comparison(console: Console, lines: Sequence[VariantResult], metrics: Mapping[str, Metric]) -> None:
    """Print a comparison's tables, the first of the monitored metric."""
    metric = metrics[lines[0].monitor]
    seeds = len(lines[0].results)
    pm = "±" if console.encoding.lower().startswith("utf") else "+-"
    title = f"mean {pm} standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    say(console, f"test {metric.name}{' in %' if metric.percent else ''}, {title}")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    chosen = ["chosen"] if all("chosen" in line.figures for line in lines) else []
    figures = ["best", "last_five", *chosen]
    headings = [*(figure.replace("_", " ") for figure in figures), "traffic"]
    for heading in (*headings, "est. time" if lines[0].seconds_estimated else "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        for model in ("global", *(name for name in line.others if not name.startswith("copy "))):
            shown = figures if model == "global" else figures[:2]
            scores = [_score(line.mean_std(figure, model), metric, pm) for figure in shown]
            cost = (f"{size(line.traffic)} {line.relative_traffic:.2f}x", f"{line.seconds:.1f} s")
            table.add_row(*((line.label, *scores, *cost) if model == "global" else (f"  its {model}", *scores)))
    console.print(table)
    count = min(len(result.values()) for line in lines for result in line.results)
    say(console, f"best: the best {metric.name} on the test data, so it is optimistic")
    say(console, f"last five: mean of the {_last(count) if count else 'last five evaluations'}")
    if chosen:
        say(console, "chosen: at the evaluation with the best score on validation data")
    say(console, "traffic: of one run, and relative to FedAvg's: a model down and a model up each time a client trains")
    if lines[0].seconds_estimated:
        say(console, "est. time: of one run, an estimate: runs that train together share the time by their steps")
    further = [other for other in metrics.values() if other.name not in (metric.name, "loss")]
    if further:
        _show_further(console, lines, further, pm)
    if all(line.client_test() for line in lines):
        _show_clients(console, lines, metric)
    if len(lines) > 1:
        _show_differences(console, lines, metric, pm)


def _score(figure: tuple[float, float | None], metric: Metric, pm: str, sign: str = "") -> str:
    """Return a mean and, if there is one, its deviation; in percent if the metric is shown so."""
    mean, deviation = figure
    scale, form = (100, ".2f") if metric.percent else (1, ".4f")
    return f"{scale * mean:{sign}{form}}" + ("" if deviation is None else f" {pm} {scale * deviation:{form}}")


def _show_further(console: Console, lines: Sequence[VariantResult], metrics: Sequence[Metric], pm: str) -> None:
    """Print the metrics that are recorded besides the one that is monitored."""
    console.print()
    say(console, "last five of the other metrics")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    for metric in metrics:
        table.add_column(f"{metric.name}, %" if metric.percent else metric.name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(line.label, *(_score(line.mean_std("last_five", metric=m.name), m, pm) for m in metrics))
    console.print(table)


def _show_clients(console: Console, lines: Sequence[VariantResult], metric: Metric) -> None:
    """Print how a metric spreads over the clients' own test data."""
    console.print()
    say(console, f"{metric.name} on the clients' own test data{' in %' if metric.percent else ''}, mean over seeds")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run")
    for heading in SPREAD.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        found = line.client_test()
        table.add_row(line.label, *(_score((found[name], None), metric, "") for name in SPREAD))
    console.print(table)


def _show_differences(console: Console, lines: Sequence[VariantResult], metric: Metric, pm: str) -> None:
    """Print by how much the other variants exceed the first, seed by seed."""
    first, *others = lines
    seeds = [result.settings.seed for result in first.results]
    console.print()
    unit = ", in percentage points" if metric.percent else ""
    say(console, f"difference in last five to {first.label} with the same seed{unit}")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run")
    headings = ["mean", *(f"seed {seed}" for seed in seeds[:MOST_SEEDS])] if len(seeds) > 1 else [f"seed {seeds[0]}"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for line in others:
        by_seed = line.differences(first)
        mean = [_score(mean_std(by_seed), metric, pm, "+")] if len(seeds) > 1 else []
        table.add_row(line.label, *mean, *(_score((value, None), metric, pm, "+") for value in by_seed[:MOST_SEEDS]))
    console.print(table)


def show_parts(console: Console, registry: Registry[Any]) -> None:
    """Print the entries of a registry with their options."""
    table = _table(registry.kind, "options")
    for name, note in registry:
        part = registry.get(name)
        words = ", ".join(o if value is None else f"{o}={_lower(value)}" for o, value in options(part).items())
        models = declared(part, "extra_models", ())
        table.add_row(name, note, words + (f"; --evaluate {', '.join(models)}" if models else ""))
    console.print(table)


def show_registry(console: Console, registry: Registry[Any]) -> None:
    """Print the entries of a registry."""
    table = _table(registry.kind)
    for name, note in registry:
        table.add_row(name, note)
    console.print(table)


def show_datasets(console: Console, found: Mapping[str, str]) -> None:
    """Print the datasets, where the files of published ones were found, and their options."""
    for name, note in DATASETS:
        say(console, f"{name}: {note}", indent=2)
        if name in found:
            say(console, f"  files: {found[name]}", indent=4)
        words = ", ".join(f"{option}={_option(value)}" for option, value in dataset_options(DATASETS.get(name)).items())
        if words:
            say(console, f"  options (-d NAME=VALUE): {words}", indent=4)
    console.print()


def show_partition(console: Console, federation: Federation, skew: Skew, rows: int) -> None:
    """Print a federation's statistics, and the first `rows` clients with their class mixes."""
    say(console, str(federation))
    show_fields(
        console,
        {
            "samples": "{0:,.0f} to {2:,.0f} per client, median {1:,.0f}".format(*skew.samples),
            "classes": "{0:.0f} to {2:.0f} per client, median {1:.0f}; mean effective number {3:.1f}".format(
                *skew.classes, skew.effective_classes
            ),
            "skew": f"{skew.distance:.3f} mean total variation distance from all data (0: no skew); "
            f"the most frequent class is {100 * skew.largest_share:.0f} % of a client's samples on average",
        },
    )
    cells = [_client_row(console, federation, client) for client in range(min(rows, federation.clients))]
    headings = ("client", "samples", "classes", "most frequent", "mix")
    columns = list(zip(*([headings, *cells]), strict=True))
    needed = sum(max(map(len, column)) + 2 for column in columns) - 2
    fits = needed <= console.width
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings if fits else headings[:-1]:
        table.add_column(heading, justify="right" if heading in ("samples", "classes") else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(row if fits else row[:-1]))
    console.print(table)
    if fits:
        say(console, "mix: one column per class, scaled to the client's most frequent class")
    else:
        say(console, f"widen the terminal to {needed} columns to see each client's class mix")
    if rows < federation.clients:
        say(console, f"and {federation.clients - rows:,} more clients; --rows 0 lists all")


def _client_row(console: Console, federation: Federation, client: int) -> tuple[str, ...]:
    """Return a client's name, samples, classes, most frequent class, and class mix as a bar chart in text."""
    counts = federation.class_counts[client]
    most = int(counts.argmax())
    name = federation.class_names[most] if federation.class_names else str(most)
    label = federation.client_names[client] if federation.client_names else str(client)
    levels = " ▁▂▃▄▅▆▇█" if console.encoding.lower().startswith("utf") else " 12345678"
    mix = "".join(levels[math.ceil(8 * count / counts[most])] for count in counts)
    share = f"{100 * counts[most] / counts.sum():3.0f} % {name}"
    return label, f"{counts.sum():,}", str((counts > 0).sum()), share, mix


def _option(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(f"{v:g}" for v in value) + "]"
    return _lower(value) if value != "" else "..."


def size(count: float) -> str:
    """Return a number of bytes in kB or MB."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _table(kind: str, *more: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in (kind, "description", *more):
        table.add_column(heading, overflow="fold", no_wrap=heading == kind)
    return table


def _lower(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
