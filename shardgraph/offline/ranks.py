"""Files that ranks wrote with ``torch.save``: each with the rank's shards, and a description of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardgraph.errors import CheckpointError
from shardgraph.module.local_state import FORMAT
from shardgraph.offline.files import load

Source = str | Path | Mapping[str, Any]
"""A file of a rank, or what it holds."""

_WRAPPERS = {"_fsdp_wrapped_module", "_fpw_module"}


class OfRank(NamedTuple):
    """What one rank saved. ``where`` names it in errors."""

    where: str
    shards: dict[str, torch.Tensor]
    description: Mapping[str, Any]

    def shard(self, name: str) -> torch.Tensor:
        """The shard of that name.

        Raises:
            CheckpointError: there is none.
        """
        if name not in self.shards:
            raise CheckpointError(f"{self.where} has no shard of {name!r}, which its description names")
        return self.shards[name]


def is_fairscale(description: Mapping[str, Any]) -> bool:
    """Whether it is of FairScale's ``local_metadata_dict``, not of shardgraph's."""
    return "param_metadata" in description


def files_in(folder: Path) -> list[Path]:
    """The files of ranks in a folder, by the numbers in their names: those of rank 10 after those of rank 9."""
    found = [path for path in folder.iterdir() if path.suffix in (".pt", ".pth", ".bin")]
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in _parts(path.name)])


def opened(sources: Sequence[Source], entry: str = "") -> list[OfRank]:
    """What the ranks saved, of which ``entry`` is the model's state; by default the entry that fits the description.

    Raises:
        CheckpointError: one cannot be read, or has no description, or not what it describes.
    """
    if not sources:
        raise CheckpointError("there are no files of ranks: name them, or a folder with files that end in .pt or .pth")
    return [_opened(source, entry, place) for place, source in enumerate(sources)]


def clean(name: str) -> str:
    """The name without those of FairScale's wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _opened(source: Source, entry: str, place: int) -> OfRank:
    where = f"entry {place} of the list" if isinstance(source, Mapping) else repr(str(source))
    contents = source if isinstance(source, Mapping) else load(Path(source))
    entries = {key: value for key, value in contents.items() if isinstance(value, Mapping)}
    described = [key for key, value in entries.items() if is_fairscale(value) or value.get("format") == FORMAT]
    if len(described) != 1:
        raise CheckpointError(
            f"{where} has {len(described) or 'no'} descriptions of its shards, and shards alone do not say what they "
            "are parts of: save {'model': sharded.local_state_dict(), 'shard_metadata': sharded.local_metadata_dict()} "
            "on each rank"
        )
    description = entries.pop(described[0])
    if entry and entry not in entries:
        raise CheckpointError(f"{where} has no entry {entry!r}; it has {', '.join(map(repr, entries))}")
    states, names = {key: _tensors(entries[key]) for key in ([entry] if entry else entries)}, _described(description)
    fits = {key: len(state.keys() & names) for key, state in states.items()}
    best = [key for key in fits if fits[key] == max(fits.values())]
    if not best or (names and not fits[best[0]]):
        raise CheckpointError(f"{where} has a description of shards, and none of the shards that it describes")
    if names and len(best) > 1:  # such as averages of the weights
        raise CheckpointError(
            f"{where} has the same shards in {' and '.join(map(repr, best))}: say which ones are the model's, as "
            f"entry={best[0]!r}"
        )
    return OfRank(where, states[best[0]], description)


def _tensors(entry: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    return {clean(name): value for name, value in entry.items() if _is_named_tensor(name, value)}


def _is_named_tensor(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, torch.Tensor)


def _described(description: Mapping[str, Any]) -> set[str]:
    """The names of shards in a description."""
    if not is_fairscale(description):
        return set(description["parameters"])
    return {
        clean(f"{part['fsdp_path']}.{name}" if part["fsdp_path"] else name)
        for part in description["param_metadata"]
        for name in part["params"]
    }


def _parts(name: str) -> list[str]:
    return re.split(r"(\d+)", name)
