"""The memory of a step over time and by module, as data: measured or predicted, saved, compared and drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardgraph.arguments import PATH, TEXT, WHOLE, Kind, checked, instance, sequence_of
from shardgraph.cost_models.partitions import even_runs
from shardgraph.errors import ShardGraphError
from shardgraph.pictures.memory import draw_moments
from shardgraph.pictures.svg import document
from shardgraph.report.analysis import Analysis
from shardgraph.sizes import aligned, format_bytes

_COLUMNS = ("parameters", "gathered parameters", "saved", "gradients")
_FORMAT = "shardgraph.memory.1"


_TRACE = Kind("a MemoryTrace", lambda value: isinstance(value, MemoryTrace))


@dataclass(frozen=True)
class Moment:
    """What is live after one operation: bytes by kind. ``half`` is ``"forward"``, ``"backward"`` or ``"optimizer"``."""

    half: str
    module: str
    label: str
    memory: Mapping[str, int]

    @property
    def live(self) -> int:
        """Live bytes."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class MemoryTrace:
    """The memory of one rank over a step.

    ``moments``
        what was live after each operation that allocates.
    ``modules``
        by the path of a module, the most bytes at a time of its own tensors, without those of modules in it, by kind:
        ``"parameters"``, ``"gathered parameters"``, ``"saved"`` (for backward), ``"gradients"``, ``"temporaries"``, ...
        Empty for a prediction, which does not tell them apart.
    ``allocated``
        the peak by the counters of CUDA's allocator, with its rounding and what kernels take for themselves; None on
        a CPU.
    """

    name: str
    moments: tuple[Moment, ...]
    modules: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    allocated: int | None = None

    @property
    def peak(self) -> Moment:
        """The moment at which most is live."""
        return max(self.moments, key=lambda moment: moment.live)

    def peaks(self) -> dict[str, int]:
        """By module, in the order in which they first run, the most bytes that were live while it ran."""
        found: dict[str, int] = {}
        for moment in self.moments:
            found[moment.module] = max(found.get(moment.module, 0), moment.live)
        return found

    @classmethod
    @checked(analysis=instance("what shardgraph.analyze returns", Analysis))
    def predicted(cls, analysis: Analysis) -> MemoryTrace:
        """What :func:`shardgraph.analyze` predicts."""
        moments = (Moment(row.half, row.module, row.label, dict(row.memory)) for row in analysis.rows)
        return cls(f"predicted for {analysis.plan.name}", tuple(moments))

    def __str__(self) -> str:
        peak, where = self.peak, self.peak.module or "the model"
        lines = [f"{self.name}: peak {format_bytes(peak.live)} at {peak.label} ({peak.half} of {where})"]
        if self.allocated is not None:
            lines.append(f"by the allocator's counters {format_bytes(self.allocated)}")
        peaks = self.peaks()
        rows: list[Sequence[str]] = [("module", *_COLUMNS, "live while it ran")]
        for module in [*peaks, *(each for each in self.modules if each not in peaks)]:
            own = [self.modules.get(module, {}).get(kind, 0) for kind in _COLUMNS]
            rows.append((module or "(the model)", *(_cell(each) for each in (*own, peaks.get(module, 0)))))
        return "\n".join([*lines, *aligned(rows)])

    @checked(other=_TRACE)
    def compare(self, other: MemoryTrace) -> str:
        """Both beside each other, as text: by kind at the peak, and by module while it runs."""
        by_kind: list[Sequence[str]] = [("at the peak", self.name, other.name, "")]
        mine, others = self.peak.memory, other.peak.memory
        for kind in dict.fromkeys([*mine, *others]):
            by_kind.append(_compared(kind, mine.get(kind, 0), others.get(kind, 0)))
        by_kind.append(_compared("all", self.peak.live, other.peak.live))
        by_module: list[Sequence[str]] = [("live while it ran", self.name, other.name, "")]
        own, theirs = self.peaks(), other.peaks()
        for module in dict.fromkeys([*own, *theirs]):
            by_module.append(_compared(module or "(the model)", own.get(module, 0), theirs.get(module, 0)))
        return "\n".join([*aligned(by_kind), "", *aligned(by_module)])

    @checked(count=WHOLE, modules=sequence_of("names of modules", TEXT))
    def cut_points(self, count: int, modules: Sequence[str] | None = None) -> list[str]:
        """The ``count`` modules before which to cut, so that the part in between that saves most for backward saves as
        little as possible: each part is then to be recomputed, as by ``recompute()`` or FairScale's
        ``checkpoint_wrapper``.

        Args:
            count: the number of cuts; one less than the number of parts.
            modules: the modules of a chain, in the order in which they run; what is saved in one counts with all
                modules in it. Default: the children of the only list of modules, by number, such as ``layers.0``.

        Raises:
            ShardGraphError: there is no such chain, or it has fewer places to cut.
        """
        chain = list(modules) if modules is not None else self._chain()
        if not 0 < count < len(chain):
            raise ShardGraphError(
                f"{len(chain)} modules one after the other have {max(len(chain) - 1, 0)} places to cut, and {count} "
                "are asked for: name the modules of a longer chain, as modules=['layers.0', 'layers.1', ...]"
            )
        saved = [self._saved_in(module) for module in chain]
        return [chain[start] for start in even_runs(saved, count + 1)[1:]]

    def _chain(self) -> list[str]:
        chains: dict[str, dict[str, None]] = {}
        for path in self.modules:
            parts = path.split(".")
            for end, part in enumerate(parts):
                if part.isdigit():
                    chains.setdefault(".".join(parts[:end]), {})[".".join(parts[: end + 1])] = None
                    break
        if len(chains) != 1:
            raise ShardGraphError(
                f"there are {len(chains)} lists of modules{': ' if chains else ''}{', '.join(chains)}; name the chain "
                "to cut, as modules=['layers.0', 'layers.1', ...]"
            )
        (found,) = chains.values()
        return sorted(found, key=lambda path: int(path.rpartition(".")[2]))

    def _saved_in(self, module: str) -> int:
        inside = (own for path, own in self.modules.items() if path == module or path.startswith(f"{module}."))
        return sum(own.get("saved", 0) for own in inside)

    @checked(path=PATH)
    def draw(self, path: str | Path) -> None:
        """Write the memory over time, by kind, as SVG."""
        peak, where = self.peak, self.peak.module or "the model"
        caption = f"Peak {format_bytes(peak.live)} at {peak.label} ({peak.half} of {where})"
        drawing = draw_moments(self.moments, f"Memory of a rank over a step: {self.name}", caption)
        Path(path).write_text(document(self.name, [drawing]), encoding="utf-8")

    @checked(path=PATH)
    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps({"format": _FORMAT, **asdict(self)}) + "\n", encoding="utf-8")

    @classmethod
    @checked(path=PATH)
    def load(cls, path: str | Path) -> MemoryTrace:
        """Read what :meth:`save` wrote.

        Raises:
            ShardGraphError: there is no such file, or it is another one.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ShardGraphError(f"{str(path)!r} cannot be read as a trace of memory: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
            raise ShardGraphError(f"{str(path)!r} is no trace of memory: give a file of MemoryTrace.save")
        return cls(**data | {"moments": tuple(Moment(**moment) for moment in data["moments"])})


def _cell(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _compared(what: str, mine: int, other: int) -> tuple[str, str, str, str]:
    change = f"{round(other / mine - 1, 3) + 0.0:+.1%}" if mine else ""  # + 0.0: no sign of nothing
    return what, _cell(mine), _cell(other), change
