"""The progress line of a long compilation, on standard error."""

from __future__ import annotations

from tqdm import tqdm


class Progress:
    """``with Progress("fsdp", stages=6) as show: show("capture")``: one bar, removed when done.

    ``enabled`` None shows it only on a terminal.
    """

    def __init__(self, title: str, stages: int, enabled: bool | None = None) -> None:
        self._title = f"shardgraph {title}"
        self._bar = tqdm(
            total=stages,
            desc=self._title,
            leave=False,
            disable=None if enabled is None else not enabled,
            bar_format="{desc} [{n_fmt}/{total_fmt}, {elapsed}]",
        )
        self._started = False

    def __enter__(self) -> Progress:
        return self

    def __call__(self, stage: str) -> None:
        """Show that ``stage`` begins; the previous one has ended."""
        if self._started:
            self._bar.update()
        self._started = True
        self._bar.set_description_str(f"{self._title}: {stage}")

    def __exit__(self, *error: object) -> None:
        self._bar.close()
