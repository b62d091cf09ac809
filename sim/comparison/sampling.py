"""How much of a difference the choice of requests alone explains: bootstrap, distance, equivalence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.comparison.figures import same_requests, samples, split_key
from sim.figures.metrics import latencies
from sim.results import Floats, RequestRecords

Ints = NDArray[np.int64]

RESAMPLES = 200
MOST_GAPS = 200_000  # inter-token latencies per side that resampling looks at
FEWEST = 8  # requests below which resampling says nothing


def block_length(values: Floats) -> int:
    """How many neighbours a resampled block must keep together for the sample's own correlation to survive.

    Twice the integrated autocorrelation time (sum until the first coefficient within chance), at most a
    quarter of the sample. Latencies of a queue are correlated: resampled one by one they would look far more
    certain than they are (Künsch 1989).
    """
    n = len(values)
    centred = values - values.mean()
    variance = float(centred @ centred)
    if n < FEWEST or variance <= 0:
        return 1
    time, floor = 1.0, 2.0 / math.sqrt(n)
    for lag in range(1, n // 4):
        rho = float(centred[:-lag] @ centred[lag:]) / variance
        if rho < floor:
            break
        time += 2.0 * rho
    return max(1, min(n // 4, math.ceil(2.0 * (time - 1.0) + 1.0)))


def resampled(n: int, block: int, rng: np.random.Generator) -> Ints:
    """Indices of one circular block resample of n values."""
    starts = rng.integers(0, n, size=math.ceil(n / block))
    picks: Ints = ((starts[:, None] + np.arange(block)) % n).reshape(-1)[:n].astype(np.int64)
    return picks


def log_ratio_spread(
    predicted: RequestRecords, measured: RequestRecords, keys: tuple[str, ...], seed: int = 0
) -> dict[str, float]:
    """Standard deviation of log(predicted / measured) of each latency key over resampled requests.

    Where both sides ran the same requests, both are resampled alike: what the requests share cancels.
    Keys whose figures cannot be resampled (too few requests, or zeros) are left out.
    """
    paired = same_requests(predicted, measured)
    columns = [_ordered(records) for records in (predicted, measured)]
    sizes = [len(column.index) for column in columns]
    if min(sizes) < FEWEST:
        return {}
    blocks = [block_length(column.ttft) for column in columns]
    if paired:
        blocks = [max(blocks)] * 2
    wanted: dict[str, tuple[tuple[str, float | None], ...]] = {}
    for key in keys:
        if (parts := split_key(key)) is not None and parts[0] != "std":
            wanted[parts[1]] = (*wanted.get(parts[1], ()), (key, parts[2]))
    rng = np.random.default_rng([seed, 0x5EED])
    draws: dict[str, list[float]] = {key: [] for key in keys}
    for _ in range(RESAMPLES):
        picks = [resampled(size, block, rng) for size, block in zip(sizes, blocks, strict=True)]
        if paired:
            picks[1] = picks[0]
        figures = [column.figures(pick, wanted) for column, pick in zip(columns, picks, strict=True)]
        for key in keys:
            ours, theirs = figures[0].get(key), figures[1].get(key)
            if ours and theirs and ours > 0 and theirs > 0:
                draws[key].append(math.log(ours / theirs))
    return {key: float(np.std(found, ddof=1)) for key, found in draws.items() if len(found) > RESAMPLES // 2}


@dataclass(frozen=True, slots=True)
class _Columns:
    """One side's samples by request, in the order of sending; NaN: the request has none."""

    index: Ints
    ttft: Floats
    tpot: Floats
    e2el: Floats
    gaps: Floats  # sorted
    owner: Ints  # of each sorted gap

    def figures(
        self, pick: Ints, wanted: Mapping[str, tuple[tuple[str, float | None], ...]]
    ) -> dict[str, float]:
        """Figures of a resample by key [s]; `wanted`: by metric, keys with their percentile (None: mean)."""
        found: dict[str, float] = {}
        for metric, figures in wanted.items():
            levels = [level for _, level in figures if level is not None]
            if metric == "itl":
                weights = np.bincount(pick, minlength=len(self.index))[self.owner]
                upto = np.cumsum(weights)
                if not len(upto) or not upto[-1]:
                    continue
                mean = float(self.gaps @ weights) / float(upto[-1])
                ranks = (int(upto[-1]) - 1) * np.array(levels) / 100.0
                quantiles = self.gaps[np.searchsorted(upto, ranks, side="right")]
            else:
                values: Floats = getattr(self, metric)[pick]
                values = values[~np.isnan(values)]
                if not len(values):
                    continue
                mean = float(values.mean())
                quantiles = np.percentile(values, levels)
            at = dict(zip(levels, quantiles.tolist(), strict=True))
            found |= {key: mean if level is None else at[level] for key, level in figures}
        return found


def _ordered(records: RequestRecords) -> _Columns:
    found = latencies(records)
    order = np.argsort(records.sent[found.ok], kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    counts = np.diff(records.itl_offsets)[found.ok]
    owner = np.repeat(place, counts)
    gaps = found.itl
    if len(gaps) > MOST_GAPS:
        keep = np.arange(0, len(gaps), math.ceil(len(gaps) / MOST_GAPS))
        gaps, owner = gaps[keep], owner[keep]
    rank = np.argsort(gaps, kind="stable")
    return _Columns(
        order,
        found.ttft[order],
        found.tpot[order],
        found.e2el[order],
        gaps[rank],
        owner[rank].astype(np.int64),
    )


@dataclass(frozen=True, slots=True)
class Distance:
    """The Kolmogorov-Smirnov distance of two samples, and what chance alone gives at their sizes.

    Attributes:
        value: largest difference of the two cumulative distributions, 0..1.
        chance: a distance that two samples of one distribution stay below in 95 of 100 cases, the sizes
            reduced by each sample's own correlation.
    """

    value: float
    chance: float


def distance(predicted: RequestRecords, measured: RequestRecords, metric: str) -> Distance | None:
    """How far two distributions are apart; None where a side has no samples."""
    ours, theirs = samples(predicted, metric), samples(measured, metric)
    if not len(ours) or not len(theirs):
        return None
    both = np.concatenate((ours, theirs))
    both.sort()
    gaps = np.searchsorted(np.sort(ours), both, "right") / len(ours)
    gaps = gaps - np.searchsorted(np.sort(theirs), both, "right") / len(theirs)
    # Gaps of one request are not independent: its requests count, not its tokens.
    sizes = [
        len(side) / block_length(samples(records, metric))
        if metric != "itl"
        else float(len(samples(records, "ttft")))
        for side, records in ((ours, predicted), (theirs, measured))
    ]
    chance = 1.358 * math.sqrt((sizes[0] + sizes[1]) / (sizes[0] * sizes[1]))
    return Distance(float(np.abs(gaps).max()), min(1.0, chance))


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Two one-sided tests that a ratio lies within the margin (Schuirmann 1987), on the log scale.

    Attributes:
        verdict: "equivalent" (p below 0.05), "different" (the 90 % interval lies outside the margin), else
            "undecided".
        p: of the weaker of the two tests.
        margin: e.g. 0.1 for a ratio between 1/1.1 and 1.1.
    """

    verdict: str
    p: float
    margin: float


def equivalence(ratio: float, spread: float, margin: float) -> Equivalence | None:
    """Test predicted / measured = `ratio` with standard deviation `spread` of its logarithm.

    None where the ratio or the spread is not above zero.
    """
    if ratio <= 0 or spread <= 0:
        return None
    limit, centre = math.log1p(margin), math.log(ratio)
    from scipy.special import ndtr

    p = float(1.0 - min(ndtr((centre + limit) / spread), ndtr((limit - centre) / spread)))
    if p < 0.05:
        return Equivalence("equivalent", p, margin)
    outside = abs(centre) - 1.645 * spread > limit
    return Equivalence("different" if outside else "undecided", p, margin)
