"""The codec of states: tables of plain values and tensors, as one safetensors file with JSON in its header."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.core.files import replacing

MARK = "$"
"""What the keys of encoded values begin with; a state's own keys must not."""


def encode(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a state as JSON values and the tensors in it; raise a `TypeError` for a type that is not known.

    Known are None, bool, int, float, str, list, dict with strings as keys, tensors and NumPy arrays. Tuples, other
    mappings and other keys would come back as something else, so they are refused.
    """
    tensors: dict[str, Tensor] = {}
    return _encoded(state, "state", tensors), tensors


def decode(plain: Any, tensors: Mapping[str, Tensor], device: torch.device | str | None = None) -> Any:
    """Return the state that `encode` took; tensors that were on a GPU are put on `device`, by default on the GPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(plain, list):
        return [decode(value, tensors, device) for value in plain]
    if not isinstance(plain, Mapping):
        return plain
    if f"{MARK}float" in plain:
        return float(plain[f"{MARK}float"])
    if f"{MARK}array" in plain:
        return tensors[plain[f"{MARK}array"]].numpy()
    if f"{MARK}tensor" in plain:
        found = tensors[plain[f"{MARK}tensor"]]
        return found.to(device) if plain["device"] != "cpu" else found
    return {name: decode(value, tensors, device) for name, value in plain.items()}


def save_state(path: Path, state: Any) -> None:
    """Write a state to a file, atomically."""
    plain, tensors = encode(state)
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"state": json.dumps(plain, allow_nan=False)})


def load_state(path: Path, device: torch.device | str | None = None) -> Any:
    """Read a state from a file; tensors that were on a GPU are put on `device`, by default on the GPU."""
    try:
        with safe_open(path, "pt") as file:
            plain = json.loads((file.metadata() or {})["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        return decode(plain, tensors, device)
    except (SafetensorError, KeyError, ValueError) as error:
        raise SettingError(f"{str(path)!r} is not a state that fedcat wrote: {error}") from error


def _encoded(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {f"{MARK}float": str(value)}
    if type(value) is list:
        return [_encoded(part, f"{place}[{i}]", tensors) for i, part in enumerate(value)]
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)  # safetensors shares nothing
        return {f"{MARK}tensor": name, "device": value.device.type}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        name = str(len(tensors))
        tensors[name] = torch.from_numpy(np.array(value))
        return {f"{MARK}array": name}
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key.startswith(MARK):
                raise TypeError(f"{place} has the key {key!r}: keys must be strings that do not begin with {MARK}")
        return {key: _encoded(part, f"{place}.{key}", tensors) for key, part in value.items()}
    raise TypeError(
        f"{place} is a {type(value).__name__}: a state may hold None, bool, int, float, str, list, dict with "
        "strings as keys, tensors and NumPy arrays"
    )
