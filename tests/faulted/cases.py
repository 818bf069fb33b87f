"""Faults, drawn by number: what one rank does wrong or what happens to its connections, where, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

LIMIT = 15.0  # seconds within which every other rank has ended
TIMEOUT = 600.0  # of collectives, so that it is not what ends a rank
STEPS = 3
PHASES = ("before", "compile", "forward", "backward", "clip", "step", "save", "load", "end")
ENDINGS = ("kill", "stop", "raise", "exit", "os._exit", "return")
HARMLESS = ("slow", "lock", "delay", "pause")
NETWORK = ("cut", "stall", "delay", "pause")
DISK = ("full", "full, and room again")
OTHERS = {"skip": ("clip", "save", "forward"), "mesh": ("compile",), "catch": PHASES[1:-1]}
KINDS = (*ENDINGS, *HARMLESS[:2], *OTHERS, *NETWORK, *DISK)
LINKS = {"store": ("store",), "ranks": ("ranks",), "watch": ("watch",), "all": ("store", "ranks", "watch")}
PLANS = ("fsdp", "ddp", "zero2", "pp")
WAYS = ("launch", "launch", "plain", "plain", "plain", "plain", "script")


@dataclass(frozen=True)
class Case:
    """What ``victim`` does, in which phase of which step, and ``delay`` seconds after that begins.

    A slow rank takes ``seconds``, or holds Python's lock for as long. Connections of kind ``link`` are those of the
    victim, and under ``launch`` those of all ranks. A disk that is full has ``room`` bytes.
    """

    seed: int
    kind: str
    phase: str
    step: int
    victim: int
    ranks: int
    plan: str
    way: str
    delay: float = 0.0
    seconds: float = 9.0
    link: str = ""
    room: int = 0
    background: bool = False

    @property
    def is_harmless(self) -> bool:
        return self.kind in HARMLESS or self.kind == "full, and room again"

    @property
    def links(self) -> tuple[str, ...]:
        return LINKS[self.link]


def draw(seed: int) -> Case:
    """The case of this number."""
    choose = random.Random(seed)
    kind = choose.choice([*ENDINGS, *ENDINGS, "slow", "lock", *OTHERS, *NETWORK, "cut", "stall", *DISK, "full"])
    phases = ("save",) if kind in DISK else PHASES[2:-1] if kind in NETWORK else OTHERS.get(kind, PHASES)
    ranks = choose.choice([2, 2, 3, 4])
    plan = choose.choice(PLANS if kind != "mesh" else PLANS[:1])
    phase, way = choose.choice(phases), choose.choice(WAYS)
    if way != "launch" and phase == "before":
        phase = "compile"
    if way != "launch" and phase == "compile" and kind == "stop":  # nobody has begun to watch
        phase = "forward"
    ranks = 2 if plan == "pp" else 4 if kind == "mesh" else ranks
    delay = choose.choice([0.0, choose.uniform(0.0, 0.03)]) if kind in ("kill", "stop", *NETWORK) else 0.0
    victim = choose.randrange(1 if kind in NETWORK else 0, ranks)  # the first rank serves the store
    seconds = 9.0 if kind in ("slow", "lock") else choose.uniform(0.5, 4.0) if kind == "pause" else 0.005
    link = choose.choice([*LINKS]) if kind in NETWORK else ""
    room, background = choose.randrange(160_000), choose.random() < 0.5
    step = choose.randrange(STEPS)
    return Case(seed, kind, phase, step, victim, ranks, plan, way, delay, seconds, link, room, background)
