"""``shardgraph.consolidate``: the shards that ranks saved become one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from shardgraph.arguments import MODEL, PATH, STATE, TEXT, checked, sequence_of
from shardgraph.errors import CheckpointError
from shardgraph.offline.distributed import is_distributed, state_of_folder
from shardgraph.offline.fairscale import state_of_fairscale
from shardgraph.offline.files import write_whole
from shardgraph.offline.ranks import Source, files_in, is_fairscale, opened
from shardgraph.offline.shards import state_of_shards
from shardgraph.offline.stored import StoredState, of_model, reading

_SHARDS = PATH | sequence_of("paths of the files of ranks, or what they hold", PATH | STATE, least=1)


@checked(shards=_SHARDS, path=PATH, entry=TEXT, model=MODEL)
def consolidate(
    shards: str | Path | Sequence[Source], path: str | Path, *, entry: str = "", model: nn.Module | None = None
) -> None:
    """Write the whole tensors of a model to the safetensors file ``path``, from the shards that ranks saved.

    One process does it, without a process group or accelerator, and holds one tensor at a time. The file is as that of
    :meth:`ShardedModule.save_safetensors`, bit for bit: ``safetensors.torch.load_model(original, path)`` loads it.

    Args:
        shards: a folder of ``torch.distributed.checkpoint``, or files that ranks wrote with ``torch.save``, each with
            ``local_state_dict()`` and ``local_metadata_dict()`` of shardgraph, or of FairScale's FSDP as two entries of
            a dictionary: a folder of them, a list of paths, or of what they hold. FairScale's do not say which rank
            wrote them: a list is in the order of the ranks, a folder in that of the numbers in names.
        path: the file to write.
        entry: the name under which the model's state was saved, such as ``"model"``. Default: what fits.
        model: the original, if need be on ``meta``: names, shapes and tied names must be its. Without it, what
            ``torch.distributed.checkpoint`` saved has a tensor for every name, also for tied ones.

    Raises:
        CheckpointError: a rank's file is missing, they are of several runs, or shapes or names do not fit each other
            or the model. Nothing has been written.
    """
    with reading(repr(str(shards)) if isinstance(shards, (str, Path)) else "what ranks saved"):
        state = read_shards(shards, entry)
        write_whole(state if model is None else of_model(state, model), Path(path))


def read_shards(shards: str | Path | Sequence[Source], entry: str = "") -> StoredState:
    """The whole tensors of shards, of any format.

    Raises:
        CheckpointError: they are not those of one run.
    """
    if isinstance(shards, (str, Path)):
        folder = Path(shards)
        if is_distributed(folder):
            return state_of_folder(folder, entry)
        shards = files_in(folder) if folder.is_dir() else [folder]
    ranks = opened(shards, entry)
    kinds = {is_fairscale(rank.description) for rank in ranks}
    if len(kinds) > 1:
        raise CheckpointError("some files are of FairScale and some are not: give the files of one run")
    return state_of_fairscale(ranks) if kinds == {True} else state_of_shards(ranks)
