"""Files of a checkpoint are copied to the folders of other machines, so that a machine that is lost takes none away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shardgraph.runtime.messages import Message, Messages
from shardgraph.saves.folders import file_of
from shardgraph.saves.machines import bytes_of, keepers, new_file, synced
from shardgraph.saves.manifest import CHECKSUM, MANIFEST, METADATA


class Copies:
    """The copies that ``rank`` makes and gets of files of ``sizes`` in ``folder``, the one of its machine: each rank's
    file is on ``count`` machines, and the description, which rank 0 has written, on all."""

    def __init__(
        self, folder: Path, machines: Sequence[Sequence[int]], count: int, rank: int, sizes: Mapping[str, int]
    ) -> None:
        files = [(source, keeper, file_of(source)) for source, keeper in keepers(machines, count)]
        for ranks in machines:
            if 0 not in ranks:
                files += [(0, ranks[0], name) for name in (METADATA, MANIFEST, CHECKSUM)]
        self._folder, self._rank, self._names = folder, rank, [name for _, _, name in files]
        self._messages = [Message(source, target, sizes[name]) for source, target, name in files]
        self._got: dict[int, torch.Tensor] = {}

    def make_room(self) -> None:
        """Make the files that this rank gets.

        Raises:
            OSError: there is no room.
        """
        for number, message in enumerate(self._messages):
            if message.target == self._rank:
                self._got[number] = new_file(self._folder / self._names[number], message.nbytes)

    def exchange(self, messages: Messages) -> None:
        """Send, receive, and return when what came is on the disk. All ranks must call it.

        Raises:
            RankFailedError: another rank has failed meanwhile.
            RuntimeError: a connection is lost.
        """

        def of(number: int) -> torch.Tensor:
            if number in self._got:
                return self._got[number]
            return bytes_of(self._folder / self._names[number], self._messages[number].nbytes)

        messages.exchange(self._messages, of, "copying a checkpoint to other machines")
        for number in self._got:
            synced(self._folder / self._names[number])
        self._got.clear()
