"""Ranks check that they agree before they continue, so that a potential hang becomes an error on all of them.

It uses the process group's store and no collective: for any backend, and a failed rank can report while others work.
"""

from __future__ import annotations

import builtins
import contextlib
import difflib
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

import torch.distributed as dist

from shardgraph import errors
from shardgraph.errors import RankMismatchError
from shardgraph.runtime import watch
from shardgraph.runtime.first_made import FirstMade
from shardgraph.runtime.store_waits import ASKING, looks, read_once_more, wait_for
from shardgraph.runtime.watch.wording import named, unreachable
from shardgraph.torch_api import own_connection

_AGREED = "agreed"
_SHOWN = 12  # maximum lines of a difference in a message

_made: Counter[str] = Counter()  # number of agreements so far, by name of their group


class Agreement:
    """A series of points that all ranks of a group pass together or not at all.

    All ranks of ``group`` create their agreements in the same order, and call :meth:`agree` equally often. Each call is
    a round: a rank posts a digest of its value, and the last one to arrive compares the digests and posts the verdict,
    for which the others wait up to ``timeout`` seconds. The first verdict is final: a rank that fails, or that has
    waited too long, posts its own, and every rank raises. None, a group of one and a fake group always agree.

    ``first_made`` is what one of them makes for all, at any time.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._timeout = timeout
        self._round = self._texts = self._since = 0
        self._store: dist.Store | None = None
        self.first_made = FirstMade()
        if group is None or dist.get_world_size(group) <= 1 or dist.get_backend(group) == "fake":
            return
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        prefix = f"shardgraph/agreement/{group.group_name}/{_made[group.group_name]}"
        _made[group.group_name] += 1
        watch.begin()
        # A separate connection: a long wait on the shared one would block the process group's own threads.
        self._store = dist.PrefixStore(prefix, own_connection())
        self.first_made = FirstMade(self._store, self._rank, len(self._ranks), timeout)

    def agree(
        self, topic: str, value: str | None = None, error: BaseException | None = None, shown: str | None = None
    ) -> None:
        """Return when all ranks have arrived here with the same ``topic`` and ``value`` and without error.

        ``topic`` is a noun for messages: "the compiled program"; ``error`` is why this rank cannot continue. ``shown``
        is what messages compare instead of ``value``.

        Raises:
            RankMismatchError: on every rank: values or topics differ, a rank has an error, did not arrive in time, or
                has gone on (:meth:`go_on`).
            BaseException: ``error``, on the rank that has it.
        """
        verdict = _AGREED
        if self._store is not None:
            self._round += 1
            try:
                verdict = self._verdict(self._store, topic, value or "", error, shown)
            except RuntimeError as lost:
                if error is None and (cause := watch.failed(lost, f"the agreement on {topic}")) is not None:
                    raise cause from lost
                verdict = unreachable(self._rank, topic, str(lost))
            self._since = 0
        if error is not None:
            raise error
        if verdict != _AGREED:
            raise RankMismatchError(verdict)

    @contextlib.contextmanager
    def on_all_ranks(self, topic: str) -> Iterator[list[str]]:
        """Run the body, then :meth:`agree`: every rank has, without error and with equal lines in the yielded list."""
        lines: list[str] = []
        failure: Exception | None = None
        try:
            yield lines
        except Exception as error:  # of any kind: the other ranks must not wait for this one
            failure = error
        self.agree(topic, "\n".join(lines), failure)

    def from_first_rank(self, topic: str, make: Callable[[], str]) -> str:
        """Call ``make()`` on the first rank only, and return its result, called ``topic`` in messages, on every rank.

        Raises:
            RankMismatchError: on every rank: the first rank did not arrive, or did not finish, in time.
            Exception: on every rank, an error of the class and message that ``make`` raised.
        """
        if self._store is None:
            return make()
        self._texts += 1
        key, first, failure = f"text {self._texts}", self._rank == self._ranks[0], None
        try:
            post = json.dumps({"text": make()}) if first else ""
        except Exception as error:  # of any kind: the other ranks must not wait for this one
            post, failure = _error_post(error), error
        try:  # if the other ranks have given up, their post is the final one
            post = self._store.compare_set(key, "", post).decode() if first else self._wait(self._store, key, topic)
        except dist.DistError as lost:
            post = _error_post(RankMismatchError(unreachable(self._rank, topic, str(lost))))
        if failure is not None:
            raise failure
        return _text_of(post)

    def _wait(self, store: dist.Store, key: str, topic: str) -> str:
        try:
            wait_for(store, key, self._timeout, topic, self._ranks[:1])
        except dist.DistError:  # a timeout, or the store is gone: the next line tells which
            late = (
                f"rank {self._ranks[0]} did not have {topic} within {self._timeout:g} s of rank {self._rank}. It has "
                "ended, or is still busy: allow more time with timeout="
            )
            store.compare_set(key, "", _error_post(RankMismatchError(late)))
        post = store.get(key).decode()
        if "text" in json.loads(post):
            read_once_more(store, len(self._ranks) - 1, key)
        return post

    def go_on(self) -> None:
        """Post that this rank begins to communicate with the others, as all last agreed; not a round.

        All ranks do it equally often between two rounds. One that comes to a round and finds that its neighbour has
        gone on instead knows that it waits in vain. Nothing is waited for: it takes microseconds.
        """
        if self._store is not None:
            self._since += 1
            with contextlib.suppress(RuntimeError):  # the store is gone: communication will tell
                self._store.set(f"since/{self._rank}", f"{self._round} {self._since}")

    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        """Run what communicates with the others, as all last agreed: :meth:`go_on`.

        Raises:
            RankMismatchError: it fails, and another rank has not gone on.
        """
        self.go_on()
        try:
            yield
        except RuntimeError as error:
            if (verdict := self.verdict_against()) is not None:
                raise RankMismatchError(verdict) from error
            raise

    def show(self, text: str) -> None:
        """Post the text by which messages describe what this rank goes on with; not a round."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"shown/{self._rank}", text)

    def verdict_against(self) -> str | None:
        """Why the others cannot go on with this rank, if one of them is at a round that it has not come to."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None and self._store.check([key := f"{self._round + 1}/verdict"]):
                return self._store.get(key).decode()
        return None

    def post_presence(self) -> None:
        """Post that this rank is still alive after a failed step; not a round."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone with the rank that served it
                self._store.set(f"present/{self._rank}", "")

    def is_present(self, rank: int, seconds: float) -> bool:
        """Whether ``rank`` posts its presence within ``seconds``."""
        with contextlib.suppress(RuntimeError):  # it does not, or the store is gone
            if self._store is not None:
                self._store.wait([f"present/{rank}"], timedelta(seconds=seconds))
            return True
        return False

    def first_failure(self, text: str, within: float = 0.0) -> str:
        """The text of the first rank that failed: ``text``, unless another rank posts one ``within`` seconds."""
        if self._store is None:
            return text
        try:
            if within:
                with contextlib.suppress(dist.DistError):  # no other does
                    self._store.wait(["failure"], timedelta(seconds=within))
            return self._store.compare_set("failure", "", text).decode()
        except RuntimeError:  # the store is gone with the rank that served it
            return text

    def _verdict(
        self, store: dist.Store, topic: str, value: str, error: BaseException | None, shown: str | None
    ) -> str:
        key = f"{self._round}/verdict"
        if self._round == 1:
            watch.introduced(topic)
        if error is not None:
            store.compare_set(key, "", f"rank {self._rank} failed at {topic}: {type(error).__name__}: {error}")
        # Posts are overwritten in the next round, which a rank enters only with the verdict of this one.
        store.set(f"text/{self._rank}", value if shown is None else shown)
        store.set(f"post/{self._rank}", json.dumps([self._round, topic, hashlib.sha256(value.encode()).hexdigest()]))
        if store.add(f"{self._round}/arrived", 1) == len(self._ranks):
            store.delete_key(f"{self._round - 1}/verdict")
            store.delete_key(f"{self._round - 1}/arrived")
            if not store.check([key]):
                store.compare_set(key, "", self._compare(store))
        try:
            if error is None:
                self._await(store, key, topic)
        except RuntimeError:  # no verdict in time, or the store is gone: then the next line raises
            store.compare_set(key, "", self._overdue(store, topic))
        return store.get(key).decode()

    def _await(self, store: dist.Store, key: str, topic: str) -> None:
        """Wait for a verdict, and look now and then whether the next rank has gone on without it.

        If some ranks have, one of those that wait here is before one of them, and posts the verdict for all.
        """
        following = self._ranks[(self._ranks.index(self._rank) + 1) % len(self._ranks)]
        with watch.agreeing(topic) as waiting:
            for look in looks(store, [key], self._timeout):
                watch.look_after(waiting.absent, topic, ask=look % ASKING == 0)
                if self._has_gone_on(store, following):
                    store.compare_set(key, "", self._gone_on(store, topic, following))
                    return
                waiting.absent = [rank for rank in self._ranks if not self._has_posted(store, rank)]

    def _has_gone_on(self, store: dist.Store, rank: int) -> bool:
        post = f"since/{rank}"
        if self._has_posted(store, rank) or not store.check([post]):
            return False
        past, since = map(int, store.get(post).split())
        return past == self._round - 1 and since > self._since

    def _gone_on(self, store: dist.Store, topic: str, rank: int) -> str:
        return "\n".join(
            [
                f"the ranks differ in {topic}: rank {rank} has gone on with what all last agreed on, and rank "
                f"{self._rank} communicates something else. All ranks must make the same calls in the same order",
                *self._differences(store, (rank, f"shown/{rank}"), (self._rank, f"text/{self._rank}")),
            ]
        )

    def _differences(self, store: dist.Store, *posts: tuple[int, str]) -> list[str]:
        """The lines in which the texts of two ranks differ, which are under these keys."""
        left, right = (store.get(key).decode().splitlines() if store.check([key]) else [] for _, key in posts)
        one, other = (f"rank {rank}" for rank, _ in posts)
        lines = list(difflib.unified_diff(left, right, one, other, n=0, lineterm=""))
        return [*lines[:_SHOWN], *(["..."] if len(lines) > _SHOWN else [])]

    def _compare(self, store: dist.Store) -> str:
        posts = [json.loads(post) for post in store.multi_get([f"post/{rank}" for rank in self._ranks])]
        topics = _ranks_by_value(self._ranks, [topic for _, topic, _ in posts])
        if len(topics) > 1:
            where = "; ".join(f"{named(ranks)} at {topic}" for topic, ranks in topics.items())
            return f"the ranks are not at the same point: {where}. All ranks must make the same calls in the same order"
        majority, *others = _ranks_by_value(self._ranks, [digest for _, _, digest in posts]).values()
        if not others:
            return _AGREED
        shown = majority[0], others[0][0]
        differing = sorted(rank for ranks in others for rank in ranks)
        message = (
            f"the ranks differ in {posts[0][1]}: {named(differing)} from {named(majority)}. Give every rank the "
            "same, with weights from one seed or checkpoint; only the content of its batch may differ"
        )
        return "\n".join([message, *self._differences(store, *((rank, f"text/{rank}") for rank in shown))])

    def _overdue(self, store: dist.Store, topic: str) -> str:
        absent = [rank for rank in self._ranks if not self._has_posted(store, rank)]
        who = f"{named(absent)} did not come" if absent else "all ranks came, but one then stopped"
        return (
            f"{who} to {topic} within {self._timeout:g} s of rank {self._rank}. Such a rank makes another "
            "call, or none, or has ended, or is still busy: give all ranks equally many batches, or train inside of "
            "join(), or allow more time with timeout="
        )

    def _has_posted(self, store: dist.Store, rank: int) -> bool:
        post = f"post/{rank}"
        return store.check([post]) and json.loads(store.get(post))[0] == self._round


def _error_class(name: str) -> type[Exception] | None:
    """The error class of this name that every rank knows."""
    return getattr(errors, name, None) or getattr(builtins, name, None)


def _error_post(error: Exception) -> str:
    """What is posted instead of a text: the most specific class of the error that every rank knows, and its message."""
    name = next(kind.__name__ for kind in type(error).__mro__ if _error_class(kind.__name__) is kind)
    return json.dumps({"error": name, "message": str(error)})


def _text_of(post: str) -> str:
    """The posted text; a posted error is raised."""
    record = json.loads(post)
    if "text" in record:
        return str(record["text"])
    name, message = record["error"], record["message"]
    kind = _error_class(name) or RuntimeError
    try:
        error = kind(message)
    except TypeError:  # a class whose constructor needs more than a message
        error = RuntimeError(f"{name}: {message}")
    raise error


def _ranks_by_value(ranks: Iterable[int], values: Iterable[str]) -> dict[str, list[int]]:
    """The ranks by their value, the largest group first; among equal sizes the one with the lowest rank."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for rank, value in zip(ranks, values, strict=True):
        groups[value].append(rank)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))
