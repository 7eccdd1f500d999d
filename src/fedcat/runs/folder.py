"""What a run leaves behind: a folder of plain files."""

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
DEVICES = "clients.json"
COMPARISON = "comparison.json"


def check_free(path: Path) -> None:
    """Raise a `SettingError` if a run cannot be put at `path`."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.is_file():
        raise SettingError(f"out folder {str(path)!r} is a file: choose another")
    if (path / SETTINGS).exists() or (path / COMPARISON).exists():
        raise SettingError(f"out folder {str(path)!r} holds a run already: choose another or remove it")
    if path.exists():
        raise SettingError(f"out folder {str(path)!r} exists and is not empty: choose another")


class RunFolder:
    """The folder of one run, written to while it goes on.

    Parameters
    ----------
    path : Path
        Where; it must not hold anything yet.
    settings : str
        The settings' TOML text.
    """

    def __init__(self, path: Path, settings: str) -> None:
        check_free(path)
        self.path = path
        self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_text(path / SETTINGS, settings)
        except OSError as error:
            raise SettingError(f"out folder {str(path)!r} cannot be written: {error.strerror}") from error
        self._history: IO[str] = (path / HISTORY).open("w", encoding="utf-8")
        self._traffic: IO[str] = (path / TRAFFIC).open("w", encoding="utf-8")
        self._traffic.write("round,client,down,up\n")
        self._whole = (0, self._history.tell(), self._traffic.tell())

    @property
    def rounds(self) -> int:
        """How many rounds are written."""
        return self._whole[0]

    def add(self, record: dict[str, Any], entries: Iterable[Entry]) -> None:
        """Append one round to the history and its traffic to the ledger's file.

        Where an interrupt cuts it short, the round counts as not written, and adding it again begins where it began.
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
        """Remove what was written, and the folders that were made for it, of a run that could not start."""
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
        """Write the summary and the models' tensors, the global one's and others' by name, and close the files."""
        self._history.close()
        self._traffic.close()
        for name, tensors in models.items():
            save_model(model_path(self.path, name), tensors)
        if clients is not None:
            write_text(self.path / DEVICES, json.dumps(clients, indent=1) + "\n")
        write_text(self.path / SUMMARY, json.dumps(summary, indent=2) + "\n")


def model_path(folder: Path, name: str = "global") -> Path:
    """Return where a run's folder holds one of its models."""
    return folder / (MODEL if name == "global" else f"{name}.safetensors")


def models_in(folder: Path) -> list[str]:
    """Return the names of the models that a run's folder holds."""
    return ["global" if path.name == MODEL else path.stem for path in sorted(folder.glob("*.safetensors"))]


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it, so that it is whole or not there."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def save_model(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write named tensors as safetensors, whole or not at all."""
    with replacing(path) as temporary:
        save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, temporary)


def model_tensors(layout: Layout, row: Tensor) -> dict[str, Tensor]:
    """Return every tensor of a net that a file must hold: the row's, and the constants beside it."""
    return {**layout.unpack(row), **layout.kept}


def read_model(path: Path, net: nn.Module) -> nn.Module:
    """Fill `net` with the weights of a file and return it, ready to evaluate."""
    if not path.exists():
        folder = str(path.parent)
        raise SettingError(f"folder {folder!r} holds no {path.name}: its run failed, see {SUMMARY}")
    stored = load_file(path)
    missing, unexpected = net.load_state_dict(stored, strict=False)
    tied = {t.data_ptr() for n, t in net.state_dict().items() if n in stored}
    lost = [n for n in missing if net.state_dict()[n].data_ptr() not in tied]
    if lost or unexpected:
        raise SettingError(
            f"net does not fit {path.name}: missing {lost or 'nothing'}, unknown {unexpected or 'nothing'}"
        )
    return net.eval()


def read_summary(folder: Path) -> dict[str, Any]:
    """Read a run's summary."""
    path = folder / SUMMARY
    if not path.exists():
        raise SettingError(f"folder {str(folder)!r} holds no finished run: {SUMMARY} is missing")
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Read a run's history, one mapping a round."""
    lines = (folder / HISTORY).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
