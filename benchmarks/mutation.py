"""Mutation testing: change the code in small ways, and see whether the tests notice.

    python benchmarks/mutation.py src/fedcat/methods/fedcat.py ... [--tests PATH ...] [--then PATH ...] [--jobs N]
                                  [--limit SECONDS] [--out FILE.json] [--sample N --seed S]

Every mutant is one change in one place of a file, tried in a temporary copy of src, tests and pyproject.toml. It is
killed if the tests fail or pass the time limit, and survives if they pass. The tests `--tests` come first; those of
`--then` are run only for what they let pass. By default these are the tests that mirror the file, and those that
`WIDER` names for its package. A survivor is a test to be written, or a change that changes no behavior.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FIRST = {
    "config/presets/__init__.py": "config/test_presets.py",
    "config/toml.py": "config/test_settings.py",
    "data/dataset.py": "data/test_federation.py data/test_builtin.py",
    "data/pool.py": "data/test_federation.py",
    "data/split.py": "data/test_federation.py",
    "engines/base.py": "runs/test_driver.py",
    "engines/sequential.py": "engines/test_batch_order.py methods/test_fedavg.py methods/test_fedprox.py",
    "methods/__init__.py": "methods/test_fedcat.py methods/test_server_optimizer.py",
    "methods/clusamp.py": "methods/selection/test_clustered.py",
    "methods/aggregation.py": "methods/test_aggregation.py",
    "methods/cyclic.py": "methods/test_related_methods.py",
    "methods/fedcluster.py": "methods/test_related_methods.py",
    "methods/fedopt.py": "methods/test_server_optimizer.py",
    "methods/rounds.py": "methods/test_fedavg.py methods/test_related_methods.py",
    "methods/selection/base.py": "methods/selection/test_grouped.py",
    "protocol/hop.py": "protocol",
    "runs/lifecycle.py": "runs/test_callbacks.py runs/test_run.py",
    "runs/progress.py": "runs/test_run.py runs/test_runner.py",
    "runs/summary.py": "runs/test_folder.py runs/test_runner.py",
}
"""Tests of files whose name no test file bears."""
WIDER = {
    "config": "config runs/test_build.py methods/test_server_optimizer.py",
    "core": "core config",
    "data": "data/test_federation.py data/test_partitions.py data/test_builtin.py",
    "engines": "engines/test_agreement.py methods/test_fedavg.py",
    "methods": "methods/test_every_method.py methods/test_base.py",
    "protocol": "protocol runs/test_run.py",
    "runs": "runs",
}
"""Tests of a package that are run for what the tests of the file itself let pass."""

KINDS = "Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, And Or, Add Sub, Mult Div, FloorDiv Mod, BitOr BitAnd"
SWAPS = {getattr(ast, a): getattr(ast, b) for p in KINDS.split(", ") for a, b in (p.split(), p.split()[::-1])}
SWAPS[ast.Pow] = ast.Mult
NAMES = {"min": "max", "any": "all", "sum": "mean", "argmin": "argmax", "ceil": "floor"}
NAMES |= {other: name for name, other in NAMES.items()}
SYMMETRIC = ("min", "max", "minimum", "maximum", "equal", "array_equal")
TEXT = ("unknown_name", "add_note", "dataclass", "TypeVar")
"""Functions whose arguments are not mutated."""


@dataclass(frozen=True)
class Mutant:
    """One change: the bytes `start` to `stop` of a file are replaced."""

    file: Path
    line: int
    what: str
    start: int
    stop: int
    new: str


def mutants(path: Path) -> list[Mutant]:
    """Return all mutants of a file, in the order of its lines."""
    source = (ROOT / path).read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    found = {}
    for node, new in changes(ast.parse(source)):
        start = begins[node.lineno - 1] + node.col_offset
        stop = begins[node.end_lineno - 1] + node.end_col_offset
        old, bare = ast.unparse(node), new[1:-1] if new.startswith("(") else new
        if bare != old:
            same = next((i for i, (a, b) in enumerate(zip(old, bare, strict=False)) if a != b), 0)
            same = max(0, same - 20)
            what = f"{old[same : same + 60]} -> {bare[same : same + 60]}"
            found[start, stop, new] = Mutant(path, node.lineno, what, start, stop, new)
    return sorted(found.values(), key=lambda mutant: (mutant.start, mutant.stop, mutant.new))


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield the nodes below `node` that can be changed, with the code to put in their place."""
    for child in parts(node):
        yield from mutated(child)
        if not isinstance(child, (ast.Raise, ast.JoinedStr)):  # the text of errors; f-strings are changed as a whole
            yield from changes(child)


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of a node, without documentation, annotations, imports and what only a type checker reads."""
    skipped = {"annotation", "returns", "type_params", "ctx"}
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or name in skipped or isinstance(child, (ast.Import, ast.ImportFrom)):
                continue
            text = ast.unparse(child).split("\n")[0] if isinstance(child, ast.stmt) else ""
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if text.startswith(("if TYPE_CHECKING", "__all__", "def __repr__", "def __str__")):
                continue
            if isinstance(child, ast.Call) and getattr(child.func, "id", "") in TEXT:
                continue
            yield child


def mutated(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield the changes of one node."""
    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                yield node, code(node, ops=[*ops[:place], SWAPS[type(op)](), *ops[place + 1 :]])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            yield node, code(node, op=SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, code(operand)
        case ast.IfExp(body=body, orelse=other):
            yield node, code(node, body=other, orelse=body)
        case ast.Constant(value=value):
            yield from ((node, new) for new in constants(value))
        case ast.JoinedStr(values=values):
            if not any(" " in str(part.value).strip() for part in values if isinstance(part, ast.Constant)):
                yield node, f"('mutated' + {ast.unparse(node)})"
        case ast.If(test=test):
            yield from ((test, truth) for truth in ("True", "False"))
        case ast.comprehension(ifs=ifs):
            yield from ((test, "True") for test in ifs)
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield node, "return None"
        case ast.Name(id="min" | "max" | "any" | "all" as name):
            yield node, code(node, id=NAMES[name])
        case ast.Attribute(attr=name) if name in NAMES:
            yield node, code(node, attr=NAMES[name])
        case ast.Call(args=args, keywords=keywords):
            for place, word in enumerate(keywords):
                if word.arg not in (None, "strict", "device"):  # without a GPU there is one device only
                    yield node, code(node, keywords=[*keywords[:place], *keywords[place + 1 :]])
            starred = any(isinstance(argument, ast.Starred) for argument in args)
            if len(args) == 2 and not starred and ast.unparse(node.func).split(".")[-1] not in SYMMETRIC:
                yield node, code(node, args=args[::-1])
        case ast.Slice(lower=lower, upper=upper):
            yield from ((edge, f"{ast.unparse(edge)} + 1") for edge in (lower, upper) if edge is not None)
    if deletable(node):
        yield node, "pass"


def constants(value: object) -> Iterator[str]:
    """Yield the constants that take the place of one."""
    if isinstance(value, bool):
        yield repr(not value)
    elif isinstance(value, (int, float)):
        yield "0" if value == 1 else repr(value + 1)
    elif isinstance(value, str) and " " not in value.strip():
        yield repr(value[1:] or f"{value}mutated")


def deletable(node: ast.AST) -> bool:
    """Tell whether a statement can be left out: it stores into an object, calls something, raises or leaves a loop."""
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return isinstance(targets[0], (ast.Attribute, ast.Subscript))
    calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return calls or isinstance(node, (ast.Raise, ast.Continue, ast.Break))


def code(node: ast.AST, **changed: object) -> str:
    """Return the code of a node with some of its fields changed; an expression in parentheses."""
    made = copy.copy(node)
    for name, value in changed.items():
        setattr(made, name, value)
    return ast.unparse(made) if isinstance(made, ast.stmt) else f"({ast.unparse(made)})"


def stages(path: Path, first: list[str], then: list[str]) -> list[list[str]]:
    """Return the tests of a file: what was asked for, or what mirrors it and, after that, what is wider."""
    inner = path.relative_to("src/fedcat")
    mirror = inner.with_name(f"test_{inner.name}")
    own = FIRST.get(str(inner), str(mirror if (ROOT / "tests" / mirror).exists() else inner.parent))
    if not first:
        both = (own, WIDER.get(inner.parts[0], ""))
        first, then = ([f"tests/{place}" for place in places.split()] for places in both)
    return [tests for tests in (first, then) if tests]


def outcome(mutant: Mutant | None, selections: list[list[str]], limit: float) -> str:
    """Return what the tests say about a mutant, or about the code as it is: killed, survived or timeout."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if mutant is not None:
            source = (ROOT / mutant.file).read_bytes()
            new = source[: mutant.start] + mutant.new.encode() + source[mutant.stop :]
            Path(folder, mutant.file).write_bytes(new)
        for tests in selections:
            found = passes(folder, tests, limit)
            if found != "survived":
                return found
    return "survived"


def passes(folder: str, tests: list[str], limit: float) -> str:
    """Run some tests in a copy of the tree, in a process of their own; whatever they start ends with them."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(folder)
        os.environ["PYTHONPATH"] = f"{folder}/src"
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        status = 1
        try:
            status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
        finally:
            os._exit(int(status))
    end = time.monotonic() + limit
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "killed" if status else "survived"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def tried(mutant: Mutant, selections: list[list[str]], limit: float) -> dict[str, object]:
    """Return the entry of a mutant in the results."""
    begin = time.perf_counter()
    found = outcome(mutant, selections, limit)
    seconds = round(time.perf_counter() - begin, 1)
    return {"file": str(mutant.file), "line": mutant.line, "what": mutant.what, "found": found, "seconds": seconds}


def main() -> None:
    """Try the mutants of the files that are named, and print how many of each file were killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tests", nargs="+", default=[], help="tests to run first; default: the mirror of each file")
    parser.add_argument("--then", nargs="+", default=[], help="tests to run for what survives the first ones")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per run of the tests")
    parser.add_argument("--out", type=Path, help="JSON file for the results, written as they come")
    parser.add_argument("--sample", type=int, help="try only so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it
    files = [path.resolve().relative_to(ROOT) for path in given.files]
    selections = {path: stages(path, given.tests, given.then) for path in files}
    todo = [mutant for path in files for mutant in mutants(path)]
    if given.sample is not None:
        todo = random.Random(given.seed).sample(todo, min(given.sample, len(todo)))
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    for name in ("torch", "torch.func", "scipy.cluster.hierarchy", "hypothesis"):  # once, not once per mutant
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    results: list[dict[str, object]] = []
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("fork")) as pool:
        every = sorted({tuple(tests) for chosen in selections.values() for tests in chosen})
        checks = [pool.submit(outcome, None, [list(tests)], given.limit) for tests in every]
        for tests, check in zip(every, checks, strict=True):
            if check.result() != "survived":
                sys.exit(f"the tests {' '.join(tests)} do not pass on the code as it is: {check.result()}")
        for done in as_completed([pool.submit(tried, m, selections[m.file], given.limit) for m in todo]):
            results.append(done.result())
            if given.out is not None:
                whole = given.out.with_suffix(".part")  # a kill in the middle of a write must not lose the others
                whole.write_text(json.dumps(results, indent=1) + "\n")
                whole.replace(given.out)
            if results[-1]["found"] == "survived":
                print("survived: {file}:{line}: {what}".format(**results[-1]), flush=True)
    totals = Counter(result["file"] for result in results)
    survived = Counter(result["file"] for result in results if result["found"] == "survived")
    for file, total in sorted(totals.items()):
        print(f"{total - survived[file]:5} of {total:5} killed  {file}")


if __name__ == "__main__":
    main()
