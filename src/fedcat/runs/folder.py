"""The output directory of a run and its files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedcat.core.errors import SettingError
from fedcat.core.files import replacing
from fedcat.models.layout import Layout
from fedcat.protocol.ledger import Entry

SETTINGS = "settings.toml"
HISTORY = "history.jsonl"
TRAFFIC = "traffic.csv"
MODEL = "model.safetensors"
SUMMARY = "run.json"
CLIENTS = "clients.json"
COMPARISON = "comparison.json"


def check_free(path: Path) -> None:
    """Raise a `SettingError` unless `path` is free for a run: missing or an empty directory."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.is_file():
        raise SettingError(f"out directory {str(path)!r} is a file: choose another")
    if (path / SETTINGS).exists() or (path / COMPARISON).exists():
        raise SettingError(f"out directory {str(path)!r} already holds a run: choose another or remove it")
    if path.exists():
        raise SettingError(f"out directory {str(path)!r} is not empty: choose another")


class RunFolder:
    """The directory of one run, written during the run.

    Parameters
    ----------
    path : Path
        The directory; it must be missing or empty.
    settings : str
        The settings as TOML.
    """

    def __init__(self, path: Path, settings: str) -> None:
        check_free(path)
        self.path = path
        self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_text(path / SETTINGS, settings)
        except OSError as error:
            raise SettingError(f"out directory {str(path)!r} cannot be written: {error.strerror}") from error
        self._history: IO[str] = (path / HISTORY).open("w", encoding="utf-8")
        self._traffic: IO[str] = (path / TRAFFIC).open("w", encoding="utf-8")
        self._traffic.write("round,client,down,up\n")
        self._whole = (0, self._history.tell(), self._traffic.tell())

    @property
    def rounds(self) -> int:
        """The number of rounds written."""
        return self._whole[0]

    def add(self, record: dict[str, Any], entries: Iterable[Entry]) -> None:
        """Append one round to the history and its traffic to the traffic file.

        If an interrupt cuts this short, the round counts as not written, and adding it again overwrites it.
        """
        rounds, *ends = self._whole
        lines = [f"{entry.round + 1},{entry.client},{entry.down},{entry.up}\n" for entry in entries]
        texts = (json.dumps(record) + "\n", "".join(lines))
        for file, end, text in zip((self._history, self._traffic), ends, texts, strict=True):
            file.seek(end)
            file.truncate()
            file.write(text)
            file.flush()
        self._whole = (rounds + 1, self._history.tell(), self._traffic.tell())

    def discard(self) -> None:
        """Remove the files and the directories created for a run that could not start."""
        self._history.close()
        self._traffic.close()
        for name in (SETTINGS, HISTORY, TRAFFIC):
            (self.path / name).unlink()
        for folder in self._made:
            if not any(folder.iterdir()):
                folder.rmdir()

    def finish(
        self,
        models: Mapping[str, dict[str, Tensor]],
        summary: dict[str, Any],
        clients: list[dict[str, Any]] | None = None,
    ) -> None:
        """Write the models (the global one and others by name) and the summary, and close the files."""
        self._history.close()
        self._traffic.close()
        for name, tensors in models.items():
            save_model(model_path(self.path, name), tensors)
        if clients is not None:
            write_text(self.path / CLIENTS, json.dumps(clients, indent=1) + "\n")
        write_text(self.path / SUMMARY, json.dumps(summary, indent=2) + "\n")


def model_path(folder: Path, name: str = "global") -> Path:
    """Return the path of a model in a run's directory."""
    return folder / (MODEL if name == "global" else f"{name}.safetensors")


def models_in(folder: Path) -> list[str]:
    """Return the names of the models in a run's directory."""
    return ["global" if path.name == MODEL else path.stem for path in sorted(folder.glob("*.safetensors"))]


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: under a temporary name, then renamed."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def save_model(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write named tensors as safetensors, atomically."""
    with replacing(path) as temporary:
        save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, temporary)


def model_tensors(layout: Layout, row: Tensor) -> dict[str, Tensor]:
    """Return all tensors of a net to save: those in the row, and the constants outside it."""
    return {**layout.unpack(row), **layout.kept}


def read_model(path: Path, net: nn.Module) -> nn.Module:
    """Load a file's weights into `net` and return it in evaluation mode."""
    if not path.exists():
        folder = str(path.parent)
        raise SettingError(f"directory {folder!r} holds no {path.name}: its run failed, see {SUMMARY}")
    stored = load_file(path)
    missing, unexpected = net.load_state_dict(stored, strict=False)
    tied = {t.data_ptr() for n, t in net.state_dict().items() if n in stored}
    lost = [n for n in missing if net.state_dict()[n].data_ptr() not in tied]
    if lost or unexpected:
        raise SettingError(
            f"net does not match {path.name}: missing {lost or 'nothing'}, unexpected {unexpected or 'nothing'}"
        )
    return net.eval()


def read_summary(folder: Path) -> dict[str, Any]:
    """Read a run's summary."""
    path = folder / SUMMARY
    if not path.exists():
        raise SettingError(f"directory {str(folder)!r} holds no finished run: {SUMMARY} is missing")
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Read a run's history, one mapping per round."""
    lines = (folder / HISTORY).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
