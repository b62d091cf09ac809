"""How wrong the step-time model may be, and the same model a little slower or faster."""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.engines.base import StepShape
from sim.profile import Profile
from sim.scenario import Scenario
from sim.steptime.base import FrontEnd, StepTimeModel
from sim.steptime.defaults import default_efficiencies

CALIBRATED = 0.02
DRAWS = 6


@dataclass(frozen=True)
class ScaledStepTime:
    """Another model with all its step times, host work included, times `factor`."""

    model: StepTimeModel
    factor: float
    front_end: FrontEnd = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "front_end", self.model.front_end)

    def gpu(self, shape: StepShape) -> float:
        """As the model, scaled [s]."""
        return self.factor * self.model.gpu(shape)

    def host_before(self, shape: StepShape) -> float:
        """As the model, scaled [s]."""
        return self.factor * self.model.host_before(shape)

    def host_after(self, shape: StepShape) -> float:
        """As the model, scaled [s]."""
        return self.factor * self.model.host_after(shape)

    def out_of_range(self, shape: StepShape) -> str | None:
        """As the model."""
        return self.model.out_of_range(shape)

    def assess(self, shape: StepShape) -> tuple[float, str]:
        """Device time and what bounds it, as the model tells it, scaled."""
        assess = getattr(self.model, "assess", None)
        if assess is None:
            return self.gpu(shape), "device"
        seconds, resource = assess(shape)
        return self.factor * seconds, resource


@dataclass(frozen=True, slots=True)
class ModelError:
    """By what share step times may be off either way, and where that comes from.

    `drawn`: other step times are drawn from a profile rather than scaled by `share`.
    """

    share: float
    source: str
    drawn: bool = False


def model_error(scenario: Scenario, profile: Profile | None = None) -> ModelError:
    """What to allow for: 2 % with a profile, else what `predict` allows for on such a card."""
    if profile is not None:
        return ModelError(
            CALIBRATED, f"profile {profile.source}: {DRAWS} draws of its coefficients", drawn=True
        )
    defaults = default_efficiencies(scenario.gpu)
    if defaults.assumed:
        return ModelError(defaults.step_error, f"efficiencies of {defaults.family} are assumed, not measured")
    source = f"efficiencies of {defaults.family} measured elsewhere, not on this host"
    return ModelError(defaults.step_error, source)


def error_sentences(error: ModelError, small: float) -> str:
    """What a reader may make of figures and of their differences; `small`: below which nothing is said."""
    told = f"changes below {small:.0%} are within a calibrated model's error."
    if error.drawn:
        return told.capitalize()
    return (
        f"Not calibrated: absolute figures may be off by about {error.share:.0%} ({error.source}). "
        f"Differences between points are better than that; still, {told}"
    )


def other_models(
    scenario: Scenario, model: StepTimeModel, error: ModelError, profile: Profile | None
) -> list[StepTimeModel]:
    """Step times that are also possible: what the profile's evidence allows, or slower and faster ones."""
    if profile is not None:
        return list(profile.draws(scenario, DRAWS, scenario.seed))
    return [ScaledStepTime(model, 1.0 + error.share), ScaledStepTime(model, 1.0 / (1.0 + error.share))]
