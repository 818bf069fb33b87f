"""A line on standard error that says what a long compilation is doing."""

from __future__ import annotations

from types import TracebackType

from tqdm import tqdm


class Progress:
    """``with Progress("fsdp", stages=6) as show: show("capture")``: one bar, gone when done.

    ``enabled`` None shows it on a terminal only.
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
        """Say that ``stage`` begins, and so that the one before has ended."""
        if self._started:
            self._bar.update()
        self._started = True
        self._bar.set_description_str(f"{self._title}: {stage}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
