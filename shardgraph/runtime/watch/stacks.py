"""What the threads of this process run, read without stopping them.

A frame of a thread that runs is read in one call of C, amid which the interpreter switches to no other thread. Between
two lines of Python it may: then a frame has ended, whose caller is not told, and what it says may be memory of
something else. CPython 3.11.7 has given a dictionary as the code of one, once in weeks; other programs that read the
frames of threads have crashed (https://github.com/python/cpython/issues/111363). So the chains of calls here are made
by iterators of C alone, which hold no frame when they are done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, islice, repeat, starmap, takewhile
from operator import attrgetter, itemgetter
from types import CodeType, FrameType
from typing import Any, NamedTuple


class Frame(NamedTuple):
    """A call of a function: its code, and the line, if it is at one, and the instruction that it is at."""

    code: CodeType
    line: int | None
    instruction: int

    @property
    def file(self) -> str:
        """The file of the function."""
        return self.code.co_filename

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.code.co_name


@dataclass(frozen=True)
class Stack:
    """The calls that a thread is in, innermost first."""

    frames: tuple[Frame, ...]
    _innermost: Callable[[], Iterator[FrameType]]

    @classmethod
    def of(cls, frame: FrameType) -> Stack:
        """The calls from one on, of the thread that asks."""
        return cls._from(lambda: iter([frame]))

    @classmethod
    def of_thread(cls, thread: int) -> Stack:
        """Those of a thread by its identifier; none of one that has ended, or that cannot be told."""
        return cls._from(lambda: map(itemgetter(thread), _frames()))

    @classmethod
    def _from(cls, innermost: Callable[[], Iterator[FrameType]]) -> Stack:
        with suppress(KeyError):
            read = list(map(attrgetter("f_code", "f_lineno", "f_lasti"), _callers(innermost())))
            if all(isinstance(code, CodeType) for code, _, _ in read):
                return cls(tuple(starmap(Frame, read)), innermost)
        return cls((), innermost)

    def variables(self, first: int, end: int) -> list[tuple[Frame, dict[str, Any]]]:
        """The calls from ``first`` to before ``end`` with their variables; none if the thread has gone on since."""
        with suppress(KeyError):
            read = list(map(dict, map(attrgetter("f_locals"), islice(_callers(self._innermost()), end))))
            if self._from(self._innermost).frames[:end] == self.frames[:end]:
                return list(zip(self.frames, read, strict=False))[first:]
        return []


def threads() -> list[int]:
    """The identifiers of all threads that run Python."""
    return list(chain.from_iterable(_frames()))


def _frames() -> Iterator[Mapping[int, FrameType]]:
    """The innermost frames of all threads, read when the first is taken."""
    return islice(iter(sys._current_frames, None), 1)


def _callers(innermost: Iterable[FrameType]) -> Iterator[FrameType]:
    """A frame, its caller, and so on."""
    calls: Iterable[Any] = chain(innermost, repeat("f_back"))
    return takewhile(bool, accumulate(calls, getattr))
