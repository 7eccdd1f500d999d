"""FedAvg rounds in fedcat and four other simulators, each against the same plain PyTorch loop.

    python benchmarks/peers/run.py [--works mcmahan-mnist lab-cifar] [--peers pfl fedlab flgo flower fedcat fedcat-bf16]
        [--rounds 5] [--envs DIR] [--json FILE]

Each simulator has its own environment, created on the first run, and its own process, in which its rounds and those of
the plain loop alternate. The result is its speedup over the plain loop in that process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCH = ("torch==2.13.0", "numpy")
THREADS = "2"
TRIAL_ROUNDS = 2
WORKS = ("mcmahan-mnist", "lab-cifar", "lab-mnist", "digits-cnn")


@dataclass(frozen=True)
class Peer:
    """A simulator: its script, the packages to install (those in `alone` without dependencies), the settings to try."""

    script: str
    needs: tuple[str, ...]
    alone: tuple[str, ...]
    settings: tuple[str, ...]


class Failed(Exception):
    """A peer could not be installed or run; the message says why."""


PEERS = {
    "pfl": Peer(
        "pfl_peer.py",
        ("pfl==0.6.0",),
        (),
        ("two processes", "one process, two threads", "one process, one thread"),
    ),
    "fedlab": Peer(
        "fedlab_peer.py",
        ("munch", "pandas", "pillow", "pynvml", "scikit-learn", "tqdm"),
        ("fedlab==1.3.0",),
        (
            "scale, slices, two processes",
            "standalone, slices, two threads",
            "standalone, slices, one thread",
            "standalone, DataLoader, one thread",
        ),
    ),
    "flgo": Peer(
        "flgo_peer.py",
        ("matplotlib", "networkx", "prettytable", "pynvml", "pyyaml", "requests", "scipy", "toolz", "tqdm", "ujson"),
        ("flgo==0.4.4",),
        (
            "num_parallels 2, parallel_type t",
            "serial, load_mode mem, two threads",
            "serial, load_mode mem, one thread",
            "serial, default load_mode, one thread",
            "num_parallels 2, parallel_type p",
        ),
    ),
    "flower": Peer(
        "flower_peer.py",
        ("flwr[simulation]==1.41.0",),
        (),
        ("two actors of one core", "one actor of two cores"),
    ),
    "fedcat": Peer("ours.py", (), (), ("two processes", "one process, two threads")),
    "fedcat-bf16": Peer("ours.py", (), (), ("two processes, bf16",)),
}


def say(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def call(command: list[str], limit: float, **more: Any) -> None:
    """Run a command; kill it and its children after `limit` seconds."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **more
    )
    try:
        out, _ = process.communicate(timeout=limit)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise Failed(f"took more than {limit:.0f} s") from None
        raise
    if process.returncode:
        lines = [line.strip() for line in out.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line.split(":")[0]]
        raise Failed((errors or lines or [f"exit status {process.returncode}"])[-1])


def requirements(name: str) -> list[list[str]]:
    """Return the arguments of each call of pip install."""
    peer = PEERS[name]
    needs = list(peer.needs)
    if peer.script == "ours.py":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        needs = [need for need in project["dependencies"] if not need.startswith("torch")]
    return [list(TORCH), *([needs] if needs else []), *([["--no-deps", *peer.alone]] if peer.alone else [])]


def environment(name: str, folder: Path) -> Path:
    """Create a peer's environment unless it exists, and return its Python."""
    home = folder.resolve() / name.removesuffix("-bf16")
    python, mark = home / "bin" / "python", home / "installed.json"
    wanted = json.dumps(requirements(name))
    if mark.exists() and mark.read_text() == wanted:
        return python
    say(f"{name}: installing")
    if not python.exists():
        venv.create(home, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for group in requirements(name):
        call([*pip, "--constraint", str(ROOT / "constraints.txt"), *group], limit=1800)
    mark.write_text(wanted)
    return python


def measure(
    python: Path, script: str, work: str, setting: str, rounds: int, words: argparse.Namespace, **more: Any
) -> Any:
    """Run one script and return its results."""
    variables = {"OMP_NUM_THREADS": THREADS, "MKL_NUM_THREADS": THREADS, "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [str(python), str(HERE / script), "--work", work, "--setting", setting, "--rounds", str(rounds)]
        for option, value in more.items():
            command += [f"--{option.replace('_', '-')}", str(value)]
        paths = {"PYTHONPATH": str(ROOT / "src")} if script == PEERS["fedcat"].script else {}
        call([*command, "--out", str(out)], words.limit, cwd=folder, env={**os.environ, **variables, **paths})
        if not out.exists():
            raise Failed("ended without results")
        return json.loads(out.read_text())


def compare(name: str, python: Path, work: str, threads: int, words: argparse.Namespace) -> dict[str, Any]:
    """Try a peer's settings for a few rounds and time the fastest."""
    peer = PEERS[name]
    trials: dict[str, Any] = {}
    for setting in peer.settings:
        say(f"{work}, {name}: trying {setting}")
        try:
            found = measure(python, peer.script, work, setting, TRIAL_ROUNDS, words, plain_threads=threads)
            trials[setting] = {"best": found["best"], "median": found["median"], "seconds": found["seconds"]}
        except Failed as failure:
            trials[setting] = {"failure": str(failure)}
    working = [setting for setting in trials if "best" in trials[setting]]
    if not working:
        return {"trials": trials, "failure": trials[peer.settings[0]]["failure"]}
    fastest = max(working, key=lambda setting: trials[setting]["best"])
    say(f"{work}, {name}: timing {fastest}")
    try:
        found = measure(python, peer.script, work, fastest, words.rounds, words, plain_threads=threads)
    except Failed as failure:
        return {"trials": trials, "failure": str(failure)}
    return {"trials": trials, **found}


def machine() -> dict[str, Any]:
    """Describe the machine and the state of the repository."""
    model = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    changed = subprocess.run([*git, "status", "--short"], capture_output=True, text=True, check=False).stdout.strip()
    found = {"processor": model, "cores": cores, "system": platform.system(), "load": os.getloadavg()}
    return {**found, "commit": commit, "changed": bool(changed)}


def show(work: str, found: dict[str, Any]) -> None:
    """Print the results of one workload."""
    print(f"\n{work} (plain loop: {found['plain']['threads']} threads; speedup over it, best and median round)")
    print(f"{'':11} {'version':9} {'plain':>9} {'peer':>9} {'best':>7} {'median':>7}  setting")
    plain = found["plain"]["seconds"]
    slices, loader = (
        min((s for n, s in plain.items() if n.startswith(kind)), key=min) for kind in ("slices", "loader")
    )
    best = min(slices) / min(loader)
    print(
        f"{'DataLoader':11} {'':9} {min(slices):7.3f} s {min(loader):7.3f} s {best:6.2f}x {'':7}  the plain loop itself"
    )
    rows = found["peers"].items()
    for name, row in sorted(rows, key=lambda pair: -pair[1].get("best", 0)):
        if "failure" in row:
            print(f"{name:11} failed: {row['failure']}")
            continue
        release = next(iter(row["versions"].values()))
        seconds = {who: min(times) for who, times in row["seconds"].items()}
        print(
            f"{name:11} {release:9} {seconds['plain']:7.3f} s {seconds['peer']:7.3f} s {row['best']:6.2f}x "
            f"{row['median']:6.2f}x  {row['setting']}"
        )
    for name, row in rows:
        if row.get("shims"):
            print(f"{name} runs with {row['shims']}")
        others = [f"{s} {t['best']:.2f}x" if "best" in t else f"{s}: {t['failure']}" for s, t in row["trials"].items()]
        print(f"{name} tried: {'; '.join(others)}")
    sys.stdout.flush()


def main() -> None:
    """Create the environments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", default=["mcmahan-mnist", "lab-cifar"], choices=WORKS)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5, help="rounds to time, after a warm-up round")
    parser.add_argument("--envs", type=Path, default=Path(".peers"), help="directory of the environments")
    parser.add_argument("--limit", type=float, default=900.0, help="time limit of one script, in seconds")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    pythons: dict[str, Path] = {}
    broken: dict[str, dict[str, Any]] = {}
    for name in words.peers:
        try:
            pythons[name] = environment(name, words.envs)
        except Failed as failure:
            broken[name] = {"failure": f"not installed: {failure}", "trials": {}}
    if not pythons:
        raise SystemExit("no peer could be installed: " + "; ".join(row["failure"] for row in broken.values()))
    report: dict[str, Any] = {"machine": machine(), "rounds": words.rounds, "works": {}}
    print("{processor}, {cores} cores, commit {commit:.9}".format(**report["machine"]))
    for work in words.works:
        say(f"{work}: the plain loop")
        plain = measure(next(iter(pythons.values())), "plain.py", work, "all", TRIAL_ROUNDS + 1, words)
        found = report["works"][work] = {"plain": plain, "peers": dict(broken)}
        for name, python in pythons.items():
            found["peers"][name] = compare(name, python, work, plain["threads"], words)
            if words.json:
                words.json.write_text(json.dumps(report, indent=2) + "\n")
        show(work, found)


if __name__ == "__main__":
    main()
