"""The command ``shardgraph``, also as ``python -m shardgraph``."""

from __future__ import annotations

import atexit
import signal
import sys

from shardgraph.cli.interrupts import Deferred


def main() -> int:
    """Run the command line of this process and return its exit status, 130 if interrupted while it is still loaded."""
    # When Python ends, which takes a while with torch, there is nothing left to interrupt.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is not ignored, as in the background
        signal.signal(signal.SIGINT, Deferred())
    try:
        from shardgraph.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130
    finally:
        # Python ends itself by the signal if an interrupt came inside of exec(), unless there was another exec() since.
        exec("")


if __name__ == "__main__":
    sys.exit(main())
