"""The codec of states: tables of plain values and tensors, as one safetensors file with JSON in its header.

The header also holds a checksum of everything else, so that a damaged file is not taken for a state.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.core.files import save_tensors

MARK = "$"
"""What the keys of encoded values begin with; a state's own keys must not."""


Encoded = tuple[Any, dict[str, Tensor]]
"""A state as JSON values, and the tensors in it, on the CPU."""


def encode(state: Any) -> Encoded:
    """Return a state as JSON values and copies of the tensors in it; raise a `TypeError` for a type that is not known.

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
    write_encoded(path, encode(state))


def write_encoded(path: Path, encoded: Encoded, keep: Path | None = None) -> None:
    """Write an encoded state to a file, atomically; what the file was before becomes `keep`, if one is named."""
    plain, tensors = encoded
    text = json.dumps(plain, allow_nan=False)
    save_tensors(path, tensors, {"state": text, "sha256": _checksum(text, tensors)}, keep)


def load_state(path: Path, device: torch.device | str | None = None) -> Any:
    """Read a state from a file; tensors that were on a GPU are put on `device`, by default on the GPU."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            text, expected = metadata["state"], metadata["sha256"]
            # copies, which lie in memory as new tensors do: kernels may round differently elsewhere
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (not a mapping)
        if _checksum(text, tensors) != expected:
            raise ValueError("its checksum is wrong")
        return decode(json.loads(text), tensors, device)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise SettingError(f"{str(path)!r} is damaged, or not a state that fedcat wrote: {why}") from error


def check_like(state: Any, like: Any, place: str = "state") -> None:
    """Raise a `TypeError` if a state is not built like another one: names, types, and the shapes of tensors.

    Where the other one holds None or an empty table or list, nothing is known and anything passes.
    """
    if like is None:
        return
    numbers = {type(like), type(state)} == {int, float}
    if not numbers and type(state) is not type(like):
        raise TypeError(f"{place} is a {type(state).__name__}, not a {type(like).__name__}")
    if isinstance(like, Tensor) and like.numel() and (state.shape, state.dtype) != (like.shape, like.dtype):
        raise TypeError(
            f"{place} is {state.dtype} of shape {tuple(state.shape)}, not {like.dtype} of {tuple(like.shape)}"
        )
    if isinstance(like, dict):
        for name, value in like.items():
            if name not in state:
                raise TypeError(f"{place}.{name} is missing")
            check_like(state[name], value, f"{place}.{name}")
    if isinstance(like, list) and len(state) == len(like):
        for index, (one, other) in enumerate(zip(state, like, strict=True)):
            check_like(one, other, f"{place}[{index}]")


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a state's JSON and of its tensors: names, types, shapes and bytes."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1, 1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _encoded(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {f"{MARK}float": str(value)}
    if type(value) is list:
        return [_encoded(part, f"{place}[{i}]", tensors) for i, part in enumerate(value)]
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True)
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
