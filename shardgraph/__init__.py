"""shardgraph: a compiler for distributed training with PyTorch.

    sharded = shardgraph.compile(model, plan="fsdp")

captures an unmodified module as one graph, shards it, inserts the collectives that the plan requires, and returns a
module that trains like the original on every rank of the run. Read next: :func:`compile`, :class:`Plan`,
:func:`verify`, :func:`launch`.
"""

import lazy_loader

# The names are in __init__.pyi, for type checkers too. Each is loaded when it is first used: the compiler, with what it
# needs of torch, takes longer to import than torch, and not every program that imports this package compiles.
__getattr__, __dir__, _public = lazy_loader.attach_stub(__name__, __file__)
# ``import *`` leaves alone what programs that use it have under these names: torch's ``nn``, Python's own functions.
__all__ = [name for name in _public if name not in ("nn", "input", "compile")]

__version__ = "0.1.0"
