"""Records of a simulated run: like any others, but inter-token latencies are made when somebody asks."""

from __future__ import annotations

from functools import cached_property

from sim.figures.quantiles import Runs
from sim.loop.tokens import EmissionTable
from sim.results import Floats, Ints, RequestRecords


class SimulatedRecords(RequestRecords):
    """`RequestRecords` whose `itls` are expanded on first use.

    Attributes:
        emissions: all tokens in compact form; for pooled figures without expanding.
    """

    emissions: EmissionTable

    def __init__(
        self,
        *,
        request_id: tuple[str, ...],
        scheduled: Floats,
        sent: Floats,
        first_token: Floats,
        last_token: Floats,
        prompt_len: Ints,
        output_len: Ints,
        cached_tokens: Ints,
        status: tuple[str, ...],
        itl_offsets: Ints,
        queue: Floats,
        prefill: Floats,
        preemptions: Ints,
        emissions: EmissionTable,
    ) -> None:
        columns = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.__dict__.update(columns)

    @cached_property
    def itls(self) -> Floats:
        """Inter-token latencies of all requests, one after the other [s]."""
        return self.emissions.itls(len(self))

    @cached_property
    def itl_runs(self) -> Runs | None:
        """The same as a multiset of arithmetic progressions; None if chunks hold several tokens."""
        return self.emissions.itl_runs() if self.emissions.interval == 1 else None
