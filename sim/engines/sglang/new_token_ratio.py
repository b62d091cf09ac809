"""How much of a running request's remaining output is reserved."""

from __future__ import annotations

from collections.abc import Sequence

from sim.engines.sglang.config import SglangSchedulerConfig
from sim.engines.sglang.live_request import LiveRequest

_INIT = 0.7
_MIN_FACTOR = 0.14
_DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20  # SGLANG_RETRACT_DECODE_STEPS


class NewTokenRatio:
    """The ratio's course: down a step with each decode call, up with a retraction, back when idle.

    Source: SGLang 0.5.21 `managers/scheduler_components/new_token_ratio_tracker.py` with the defaults of its
    environment variables, unless the configuration has numbers of its own.
    """

    def __init__(self, config: SglangSchedulerConfig) -> None:
        init, low, decay = (
            config.init_new_token_ratio,
            config.min_new_token_ratio,
            config.new_token_ratio_decay,
        )
        self.init = min(_INIT * config.schedule_conservativeness, 1.0) if init is None else init
        self.min = min(self.init * _MIN_FACTOR, 1.0) if low is None else low
        self.decay = (self.init - self.min) / _DECAY_STEPS if decay is None else decay
        self.current = self.init

    def decay_step(self) -> None:
        """A decode call without retraction."""
        self.current = max(self.current - self.decay, self.min)

    def decay_steps(self, count: int) -> None:
        """That many of them."""
        current, decay, low = self.current, self.decay, self.min
        while count and current > low:
            current -= decay
            count -= 1
        self.current = max(current, low)

    def reset(self) -> None:
        """The engine is idle."""
        self.current = self.init

    def after_retraction(self, kept: Sequence[LiveRequest]) -> None:
        """A retraction left these requests running."""
        outputs = sum(req.num_output_tokens for req in kept)
        limits = sum(req.max_new_tokens for req in kept)
        self.current = min(1.0, (outputs + RETRACT_DECODE_STEPS * len(kept)) / (limits + 1))
