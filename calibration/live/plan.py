"""What a validation on a real CPU engine sends: settings, and loads that its calibration did not contain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from calibration.design import PlannedRun
from calibration.parameters import Prior
from calibration.result import FitResult
from sim.workload.spec import RandomDataset, WorkloadSpec

BLOCK = 128  # vLLM's block size on a CPU [tokens]
STEP_TOKENS = 2048
MAX_SEQS = 16
CONCURRENCIES = (1, 2, 4, 8, 16)
RATE_SHARES = (0.50, 0.85)  # of the capacity that the calibrated model gives
MIXED_SHARE = 0.60  # and of its own capacity for the load of mixed lengths
# The share of the calibration's time that its first pass takes; the rest goes between the loads.
FIRST_PASS = 1 / 3
# In less, an engine that is a good deal slower than believed shows nothing.
LEAST_PASS_SECONDS = 20.0
PARTS = (0.5, 1.0)  # of a batch of decodes, when it comes again
LONG_BATCH = 4  # decodes when a batch comes again with long contexts,
LONG_PROMPT = 512  # and tokens of each one's prompt
AGAIN = 10_000  # between the seeds of a calibration run and of its repeat
CALIBRATION_SECONDS = 270.0  # of load, over all settings; warm-ups come on top, and all stays below 5 minutes

# One start of an engine against the next on the same host [of the logarithm, or s].
NEXT_START = {
    "weight_bandwidth": 0.1,
    "gemm_flops": 0.1,
    "kv_bandwidth": 0.15,
    "attention_flops": 0.15,
    "step_overhead": 0.005,
    "front_request": 3.0e-4,
    "output_delay": 0.003,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to start the engine.

    Attributes:
        flags: beside those that all settings share.
        dataset: what its loads are made of.
        share: of the calibration's seconds of load.
        concurrencies: closed loops to predict.
        extra: also loads of mixed lengths.
    """

    name: str
    flags: tuple[str, ...]
    dataset: RandomDataset
    share: float
    concurrencies: tuple[int, ...]
    extra: bool = False
    max_model_len: int = 4096


@dataclass(frozen=True, slots=True)
class Load:
    """One load to predict; `repeat` counts from 0."""

    label: str
    spec: WorkloadSpec
    repeat: int = 0

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.label}-{self.repeat + 1}"


BASE = RandomDataset(input_len=256, output_len=32, range_ratio=0.5)
SHARED = RandomDataset(input_len=128, output_len=32, range_ratio=0.5, prefix_len=256)
LONG_ANSWERS = RandomDataset(input_len=224, output_len=96, range_ratio=0.25)
MIXED = RandomDataset(input_len=512, output_len=48, range_ratio=0.9, output_range_ratio=0.8)
# 16 sequences of 224 + 96 tokens want 48 blocks: with half of them, some are preempted and computed again.
STARVED_BLOCKS = 25


def settings(quick: bool = False) -> tuple[Setting, ...]:
    """The engine without prefix cache, with it, and with too small a KV pool."""
    few = (4,) if quick else (4, 16)
    return (
        Setting(
            "prefix-off",
            ("--no-enable-prefix-caching",),
            BASE,
            0.55,
            (1, 4, 16) if quick else CONCURRENCIES,
            extra=True,
        ),
        Setting("prefix-on", ("--enable-prefix-caching",), SHARED, 0.30, few),
        Setting(
            "kv-starved",
            ("--no-enable-prefix-caching", "--num-gpu-blocks-override", str(STARVED_BLOCKS)),
            LONG_ANSWERS,
            0.15,
            (8,) if quick else (8, 16),
            # The pool must hold one request of the longest kind, or the engine does not start.
            max_model_len=1024,
        ),
    )


def serve_command(model: str, setting: Setting) -> str:
    """The launch command of a setting."""
    words = [
        *("vllm", "serve", model, "--served-model-name", "m", "--load-format", "dummy", "--enforce-eager"),
        *("--max-model-len", str(setting.max_model_len), "--max-num-seqs", str(MAX_SEQS)),
        *("--max-num-batched-tokens", str(STEP_TOKENS), "--block-size", str(BLOCK)),
        *setting.flags,
    ]
    return " ".join(words)


def loads(
    setting: Setting, capacity: float, mixed_capacity: float, repeats: int, seed: int = 1, quick: bool = False
) -> list[Load]:
    """The loads of a setting, every one `repeats` times; repeats are spread over the whole time.

    Args:
        capacity: requests/s of the setting's own requests that the calibrated model can sustain.
        mixed_capacity: the same for requests of mixed lengths.
        seed: no load shares one with the calibration or with another load.
    """
    scale = 0.5 if quick else 1.0
    base = WorkloadSpec(dataset=setting.dataset, num_warmups=1, percentiles=(50.0, 90.0, 95.0, 99.0))
    found = [
        (f"c{n}", replace(base, max_concurrency=n, num_prompts=max(8, round(scale * closed_loop_prompts(n)))))
        for n in setting.concurrencies
    ]
    for share in RATE_SHARES:
        rate = float(f"{share * capacity:.3g}")
        # As many requests as come in about a minute: P50 needs them, and a queue needs its time.
        count = max(20, round(scale * 60.0 * rate))
        found.append((f"poisson-{round(100 * share)}", replace(base, request_rate=rate, num_prompts=count)))
    if setting.extra:
        rate = float(f"{MIXED_SHARE * mixed_capacity:.3g}")
        count = max(20, round(scale * 70.0 * rate))
        spec = replace(base, dataset=MIXED, request_rate=rate, num_prompts=count)
        found.append(("mixed-lengths", spec))
    placed = []
    for repeat in range(repeats):
        for index, (label, spec) in enumerate(found):
            # A prompt that comes again is found in the prefix cache: repeats get their own prompts there
            own = repeat if "--enable-prefix-caching" in setting.flags else 0
            placed.append(Load(label, replace(spec, seed=seed + 100 * index + own), repeat))
    return placed


def first_pass_seconds(seconds: float) -> float:
    """What the first pass of a calibration of so many seconds may take."""
    return min(seconds, max(LEAST_PASS_SECONDS, FIRST_PASS * seconds))


def in_turn(
    calibration: Sequence[PlannedRun],
    found: Sequence[Load],
    seconds: float,
    price: Callable[[WorkloadSpec], float],
) -> list[Load | PlannedRun]:
    """The loads, and evenly among them the calibration's runs again with other requests, while time is left.

    Decodes alone come again with long contexts and in other batches: what lies between an idle engine and a
    full one, and what a context costs, is else unseen. A host that grows slower while the last loads run must
    be seen to.

    Args:
        calibration: its first pass, each run with the time it took.
        seconds: for all further runs.
        price: seconds that a load will take.
    """
    runs = [run for run in calibration if run.label != "pilot"]
    more: list[PlannedRun] = []
    for index in range(len(found)):
        turn = index // len(runs) + 1
        again = _otherwise(runs[index % len(runs)], turn, price)
        if again.seconds <= seconds:
            seconds -= again.seconds
            # The engine is warm by now.
            spec = replace(again.spec, seed=again.spec.seed + AGAIN * turn, num_warmups=0)
            more.append(replace(again, label=f"{again.label}-{turn + 1}", spec=spec, held_out=False))
    before = {i * len(found) // len(more): run for i, run in enumerate(more)}
    order: list[Load | PlannedRun] = []
    for index, load in enumerate(found):
        order += [before[index], load] if index in before else [load]
    return order


def _otherwise(run: PlannedRun, turn: int, price: Callable[[WorkloadSpec], float]) -> PlannedRun:
    """A run of decodes alone with long contexts, in half, in all of its batch by turns; another as it is."""
    batch, dataset = run.spec.max_concurrency or 1, run.spec.dataset
    if not run.label.startswith("decode-") or batch < 2:
        return run
    kind = (turn - 1) % (1 + len(PARTS))
    if kind == 0 and isinstance(dataset, RandomDataset):
        size, name = min(LONG_BATCH, batch), "long"
        dataset = replace(dataset, input_len=LONG_PROMPT)
    else:
        size, name = max(1, round(PARTS[kind - 1] * batch)), ""
    count = max(1, round(size * run.spec.num_prompts / batch))
    spec = replace(run.spec, dataset=dataset, num_prompts=count, max_concurrency=size)
    return replace(run, label=f"{run.label}-by-{size}{name}", spec=spec, seconds=price(spec))


def closed_loop_prompts(concurrency: int) -> int:
    """Requests of a closed loop: a handful of waves, few enough to end within about a minute."""
    return {1: 12, 2: 20, 4: 32, 8: 48, 16: 80}.get(concurrency, 5 * concurrency)


def next_prior(before: FitResult) -> Prior:
    """What is believed of the next start of the engine on a host that one fit has seen."""
    prior = before.space.prior
    deviations = dict(prior.deviations)
    for i, name in enumerate(before.space.names):
        own = float(before.covariance[i, i]) ** 0.5
        deviations[name] = min(deviations[name], float((own**2 + NEXT_START.get(name, 0.0) ** 2) ** 0.5))
    sources = dict.fromkeys(prior.sources, "an earlier start of this engine on this host")
    return Prior(before.efficiencies, deviations, sources)
