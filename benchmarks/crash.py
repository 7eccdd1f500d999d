"""Crashes: kill -9 at random moments, for all methods, alone and in comparisons. Do resumed runs end with equal bits?

    python benchmarks/crash.py [--kills 50] [--seed 0] [--out crash.json] [--keep FOLDER]

Each case is a short `fedcat run` or `fedcat compare` on the digits. Its main process gets SIGKILL at a moment that is
uniform between the first and the last file of the same command without a kill; if all is written by then, again.
Sometimes `fedcat resume` is killed too. The directory is resumed and compared with that of the whole command, without
times and notes. What differs in run.json besides numbers is told in brackets and does not count. The exit code is 1 if
anything else differs. 50 kills take about 30 minutes on two cores. Needs Linux (/proc).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import fedcat
from fedcat.core.errors import SettingError
from fedcat.runs.checkpoint import newest
from fedcat.runs.summary import versions

PAPER = "fedavg,fedprox,scaffold,fedgen,clusamp,fedcat"
SHORT = "--clients 20 --per-round 4 --epochs 1 --average 0.9 --evaluate-every 3"
EVERY = ("1r", "3r", "7r", "0.2s", "0.5s")
MORE = ("", " --validation 0.2", " --validation 0.2 --per-client")
AGAIN, PATIENCE = 0.3, 10.0  # how often a resumed run is killed too; seconds within which workers must be gone
TIMES = ("seconds", "seconds_estimated", "notes")  # what may differ
NUMBERS = ("status", "rounds", "metrics", "chosen", "validation", "client_test", "bytes", "relative_traffic")


@dataclass
class Ended:
    """How a command ended and when, what each run had written and saved, its workers and how long they lived on."""

    killed: bool
    code: int
    seconds: float
    printed: str
    rounds: list[int]
    saved: list[int | None]
    workers: int
    outlived: float


@dataclass
class Case:
    """One command that was killed once or twice and resumed."""

    command: str
    method: str
    rounds: int
    ended: list[Ended] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    asides: list[str] = field(default_factory=list)
    nothing: bool = False  # it could not be resumed, since it had not begun
    litter: list[str] = field(default_factory=list)  # temporary files that are left

    @property
    def kills(self) -> list[Ended]:
        """The processes that were killed."""
        return [one for one in self.ended if one.killed]

    def __str__(self) -> str:
        moments = [(f"{k.seconds:.2f} s at round {span(k.rounds)}", span(k.saved)) for k in self.kills]
        when = "; again ".join(f"killed after {k} of {self.rounds}, checkpoint at {saved}" for k, saved in moments)
        result = "nothing to resume: started again" if self.nothing else "NOT equal" if self.differs else "equal"
        asides = f" ({', '.join(self.asides)})" if self.asides else ""
        return f"{self.command.replace(SHORT, '...')}: {when}: {'; '.join([result, *self.differs])}{asides}"


def span(numbers: list[Any]) -> str:
    """Return one number, or the smallest and the largest of several."""
    ends = sorted(numbers, key=lambda n: -1 if n is None else n) or [None]
    return f"{ends[0]}" if ends[0] == ends[-1] else f"{ends[0]}..{ends[-1]}"


def draw(number: int, rng: random.Random) -> Case:
    """Return the case of a number; every third is a comparison."""
    methods, alone = [name for name, _ in fedcat.METHODS], number % 3 != 2
    method = methods[(number - number // 3) % len(methods)] if alone else PAPER
    rounds = 40 if "fedgen" in method else 120  # its server takes most of the time
    what = f"run --method {method}" if alone else f"compare --methods {method} --seeds {rng.choice((1, 2))}"
    rest = f"--checkpoint-every {rng.choice(EVERY)} --workers {rng.choice((1, 2))}{rng.choice(MORE)}"
    return Case(f"{what} --rounds {rounds} {SHORT} {rest}", method if alone else "comparison", rounds)


def execute(command: str, folder: Path, after: float | None = None) -> Ended:
    """Execute a command in a process group of its own; kill it so many seconds after it has the directory."""
    words = [sys.executable, "-m", "fedcat", *command.split(), *([] if command == "resume" else ["--out"]), str(folder)]
    log, env = folder.with_suffix(".log"), {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:  # not a pipe, which workers could hold open
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=file, env=env, start_new_session=True)
    held = f"process {process.pid} " if command == "resume" else ""
    names = (".lock",) if held else ("settings.toml", "comparison.json")
    while process.poll() is None and not any(held in text(folder / name) for name in names if (folder / name).exists()):
        time.sleep(0.001)
    begin, workers, outlived, killed = time.monotonic(), 0, 0.0, False
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        workers = len(group(process.pid)) - 1
        process.kill()
        killed = process.wait() < 0 and '"seconds"' not in text(folder / "run.json") + text(folder / "comparison.json")
    end = time.monotonic()
    while group(process.pid) and (outlived := time.monotonic() - end) < PATIENCE:
        time.sleep(0.01)
    for number in group(process.pid):
        os.kill(number, 9)
    if process.returncode > 0 and not held:
        raise RuntimeError(f"fedcat {command} failed: {text(log)}")
    runs = [folder] if (folder / "settings.toml").exists() else sorted(folder.glob("*/"))
    rounds, saved = [text(run / "history.jsonl").count("\n") for run in runs], [saved_round(run) for run in runs]
    return Ended(killed, process.returncode, end - begin, text(log), rounds, saved, workers, outlived)


def text(file: Path) -> str:
    """Return a file's text; none if there is no file."""
    with suppress(FileNotFoundError):
        return file.read_bytes().decode()
    return ""


def group(leader: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            state, _, number = (path / "stat").read_text().rpartition(")")[2].split()[:3]
            found += [int(path.name)] if int(number) == leader and state not in "ZX" else []
    return found


def saved_round(run: Path) -> int | None:
    """Return the round of the checkpoint that a run goes on from."""
    with suppress(SettingError):
        found, _ = newest(run)
        return None if found is None else int(found.state["rounds"])
    return None


def plain(value: Any) -> Any:
    """Return JSON values without times and notes."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    return {k: plain(v) for k, v in value.items() if k not in TIMES} if isinstance(value, dict) else value


def parts(file: Path) -> dict[str, Any]:
    """Return what a file holds by name or number; tensors as their type, shape and bytes."""
    if file.suffix == ".safetensors":
        return {n: (t.dtype, t.shape, t.contiguous().numpy().tobytes()) for n, t in load_file(file).items()}
    found = json.loads(text(file)) if file.suffix == ".json" else text(file).splitlines(keepends=True)
    found = plain([json.loads(line) for line in found] if file.suffix == ".jsonl" else found)
    return found if isinstance(found, dict) else {f"entry {n}": one for n, one in enumerate(found, 1)}


def compare(case: Case, found: Path, whole: Path) -> None:
    """Note what differs between two directories: files, and the first and the number of their parts."""
    listed = [{str(p.relative_to(top)): p for p in top.rglob("*") if p.is_file()} for top in (found, whole)]
    mine, other = ({n: p for n, p in files.items() if "checkpoint" not in n and p.name[0] != "."} for files in listed)
    case.litter = [name for name, path in listed[0].items() if path.name[0] == "."]
    case.differs += [f"{name} is {'missing' if name in other else 'new'}" for name in sorted(mine.keys() ^ other)]
    for name in sorted(mine.keys() & other):
        a, b = parts(mine[name]), parts(other[name])
        unequal = [part for part in {**b, **a} if part not in a or part not in b or a[part] != b[part]]
        aside = [part for part in unequal if name.endswith("run.json") and part not in NUMBERS]
        counted = [part for part in unequal if part not in aside]
        case.asides += [f"{name}: {', '.join(aside)}"] if aside else []
        case.differs += [f"{name}: {counted[0]}, in all {len(counted)} of {len(b)}"] if counted else []


def crash(case: Case, folder: Path, whole: Path, seconds: float, rng: random.Random) -> None:
    """Kill a case's command, resume it and compare it with the whole one, which took so many seconds."""
    while not case.kills:
        shutil.rmtree(folder, ignore_errors=True)
        case.ended.append(execute(case.command, folder, rng.uniform(0, seconds)))
    if rng.random() < AGAIN:
        left = 1 - min([one or 0 for one in case.kills[0].saved], default=0) / case.rounds
        case.ended.append(execute("resume", folder, rng.uniform(0, seconds * left)))
    case.ended.append(execute("resume", folder))
    failed = [one for one in case.ended if one.code > 0]
    if not failed:
        compare(case, folder, whole)
    elif any(case.kills[-1].rounds) or any(one.code != 2 or one.printed.count("\n") > 1 for one in failed):
        case.differs += [f"fedcat resume ended with exit code {one.code}: {one.printed.strip()}" for one in failed]
    else:
        case.nothing = True
    case.differs += ["worker processes lived on" for one in case.ended if one.outlived >= PATIENCE]


def main() -> int:
    """Kill, resume, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--keep", type=Path, help="keep all directories in this new one")
    words, begin = parser.parse_args(), time.monotonic()
    rng, cases, whole = random.Random(words.seed), list[Case](), dict[str, tuple[Path, float]]()
    with tempfile.TemporaryDirectory() as temporary:
        (place := words.keep or Path(temporary)).mkdir(parents=True, exist_ok=not words.keep)
        while sum(not case.nothing for case in cases) < words.kills:
            cases.append(case := draw(len(cases), rng))
            if case.command not in whole:
                execute(case.command, path := place / f"whole-{len(whole) + 1}")
                stamps = [file.stat().st_mtime for file in path.rglob("*")]
                whole[case.command] = path, max(stamps) - min(stamps)
            crash(case, place / f"killed-{len(cases)}", *whole[case.command], rng)
            print(f"{len(cases):3} {case}", flush=True)
    good = [case for case in cases if not case.nothing]
    kills = [kill for case in good for kill in case.kills]
    groups = {"killed and resumed": good, "alone": [case for case in good if case.method != "comparison"]}
    groups |= {name: [case for case in good if case.method == name] for name in sorted({c.method for c in good})}
    summary = {
        **{name: f"{sum(not c.differs for c in some)} of {len(some)} equal" for name, some in groups.items()},
        "killed twice": sum(len(case.kills) > 1 for case in good),
        "with other differences in run.json": sum(bool(case.asides) for case in good),
        "nothing to resume": len(cases) - len(good),
        "kills that came too late": sum(len(case.ended) - 1 - len(case.kills) for case in cases),
        "kills at which a run had no checkpoint": sum(None in kill.saved for kill in kills),
        "kills of a process with workers": sum(kill.workers > 0 for kill in kills),
        "seconds until the last worker was gone": round(max((k.outlived for k in kills if k.workers), default=0), 2),
        "cases that left temporary files": sum(bool(case.litter) for case in good),
        "minutes": round((time.monotonic() - begin) / 60, 1),
    }
    print(*(f"{name}: {value}" for name, value in summary.items()), sep="\n")
    if words.out:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        about = {**versions(), **machine, "kills": words.kills, "seed": words.seed, "summary": summary}
        words.out.write_text(json.dumps({**about, "cases": [*map(asdict, cases)]}, indent=1) + "\n")
    return int(any(case.differs for case in cases))


if __name__ == "__main__":
    sys.exit(main())
