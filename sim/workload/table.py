"""A load as columns: a request becomes an object only when looked at, so that a million fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import overload

import numpy as np
from numpy.typing import NDArray

from sim.request import Request, Segment

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
AT_ONCE = 4096  # requests turned from columns into Python numbers together


class OwnPrompts(Sequence[tuple[Segment, ...]]):
    """Prompts that share nothing: one segment each, named by a number of its own.

    Attributes:
        lens: tokens, shape (n,).
        keys: names of the segments, shape (n,), all different.
    """

    def __init__(self, lens: Sequence[int] | Ints, keys: Ints | None = None) -> None:
        self.lens = np.asarray(lens, dtype=np.int64)
        self.keys = np.arange(len(self.lens)) if keys is None else keys

    def __len__(self) -> int:
        return len(self.lens)

    @overload
    def __getitem__(self, index: int) -> tuple[Segment, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> OwnPrompts: ...

    def __getitem__(self, index: int | slice) -> tuple[Segment, ...] | OwnPrompts:
        if isinstance(index, slice):
            return OwnPrompts(self.lens[index], self.keys[index])
        return ((int(self.keys[index]), int(self.lens[index])),)

    def __iter__(self) -> Iterator[tuple[Segment, ...]]:
        for at in range(0, len(self.lens), AT_ONCE):
            keys, lens = self.keys[at : at + AT_ONCE].tolist(), self.lens[at : at + AT_ONCE].tolist()
            for segment in zip(keys, lens, strict=True):
                yield (segment,)

    def in_order(self, order: Ints) -> OwnPrompts:
        """The same prompts, those of `order` one after the other."""
        return OwnPrompts(self.lens[order], self.keys[order])


class RequestTable(Sequence[Request]):
    """Requests in order of arrival, with the ids "0", "1", ...; each look at one makes an equal object anew.

    Attributes:
        prompts: one per request.
        output_lens: tokens to generate, shape (n,).
        arrivals: send times, ascending [s], shape (n,).
        stops: whether the last token of an output is a stop token; else `ignore_eos`.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[Segment, ...]],
        output_lens: Sequence[int] | Ints,
        arrivals: Floats,
        *,
        stops: bool = False,
        priorities: Sequence[int] | None = None,
        sessions: Sequence[str | None] | None = None,
    ) -> None:
        self.prompts = prompts
        self.output_lens = np.asarray(output_lens, dtype=np.int64)
        self.arrivals = arrivals
        self.stops = stops
        self.priorities = priorities
        self.sessions = sessions

    @property
    def shares_nothing(self) -> bool:
        """Whether it is certain that no two prompts begin alike and none quotes another request."""
        return isinstance(self.prompts, OwnPrompts)

    @property
    def ids(self) -> tuple[str, ...]:
        """Id of every request."""
        return tuple(map(str, range(len(self))))

    def first(self, count: int) -> RequestTable:
        """The first so many requests."""
        return RequestTable(
            self.prompts[:count],
            self.output_lens[:count],
            self.arrivals[:count],
            stops=self.stops,
            priorities=None if self.priorities is None else self.priorities[:count],
            sessions=None if self.sessions is None else self.sessions[:count],
        )

    def sent_at(self, arrivals: Floats) -> RequestTable:
        """The same requests with other send times, ascending [s]."""
        return RequestTable(
            self.prompts,
            self.output_lens,
            arrivals,
            stops=self.stops,
            priorities=self.priorities,
            sessions=self.sessions,
        )

    def __len__(self) -> int:
        return len(self.arrivals)

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        output = int(self.output_lens[at])
        return Request(
            str(at),
            self.prompts[at],
            output,
            float(self.arrivals[at]),
            output if self.stops else None,
            self.priorities[at] if self.priorities is not None else 0,
            self.sessions[at] if self.sessions is not None else None,
        )

    def __iter__(self) -> Iterator[Request]:
        rows = zip(
            range(len(self)),
            self.prompts,
            _ints(self.output_lens),
            _floats(self.arrivals),
            _ints(self.output_lens) if self.stops else repeat(None),
            self.priorities if self.priorities is not None else repeat(0),
            self.sessions if self.sessions is not None else repeat(None),
            strict=False,
        )
        for i, prompt, output, arrival, stop, priority, session in rows:
            yield Request(str(i), prompt, output, arrival, stop, priority, session)


def _ints(column: Ints) -> Iterator[int]:
    for at in range(0, len(column), AT_ONCE):
        yield from column[at : at + AT_ONCE].tolist()


def _floats(column: Floats) -> Iterator[float]:
    for at in range(0, len(column), AT_ONCE):
        yield from column[at : at + AT_ONCE].tolist()
