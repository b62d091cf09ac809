"""What it costs: prices from a file, costs per hour, per token and per request, each with its label."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from sim.errors import BadInput
from sim.hardware.gpus import find_gpu
from sim.workload.files import place, read_text

FIELD = "--price"
MAX_PRICE = 1e9  # per GPU and hour, of any currency


@dataclass(frozen=True, slots=True)
class Prices:
    """Price of one GPU for one hour, by the GPU table's names; or `any_gpu`, the same for all."""

    per_gpu_hour: Mapping[str, float]
    currency: str = "USD"
    source: str = ""
    any_gpu: float | None = None

    def of(self, gpu: str) -> float:
        """The price of a GPU.

        Raises:
            BadInput: the file does not price it.
        """
        if self.any_gpu is not None:
            return self.any_gpu
        if gpu not in self.per_gpu_hour:
            known = ", ".join(self.per_gpu_hour) or "none"
            raise BadInput(FIELD, self.source, f"has no price for {gpu}; it prices {known}")
        return self.per_gpu_hour[gpu]


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of one deployment at one load. Every figure charges the whole bill to its own unit.

    Attributes:
        per_hour: of all GPUs.
        per_1m_input, per_1m_output, per_1m_total: per million prompt tokens, per million generated tokens,
            and per million of both together; three different denominators, never to be compared.
        per_1k_requests: per thousand requests.
        utilisation: the share of the sustainable load (under the objectives) that the figures assume.
    """

    currency: str
    per_hour: float
    per_1m_input: float | None
    per_1m_output: float | None
    per_1m_total: float | None
    per_1k_requests: float | None
    utilisation: float


def read_prices(path: str | Path) -> Prices:
    """Read a price file: YAML, one `GPU: price per hour` a line, and optionally `currency: EUR`.

    A plain number instead of a path is the price [USD] of a GPU of any kind.

    Raises:
        BadInput: naming the line: no mapping, an unknown GPU, a price that is no positive number.
    """
    if _is_number(str(path)):
        return Prices({}, source=str(path), any_gpu=_price(str(path), FIELD))
    if re.fullmatch(r"\d+,\d+", str(path)):
        raise BadInput(FIELD, str(path), f"write a price with a point: {str(path).replace(',', '.')}")
    text = read_text(path, FIELD)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = place(path, mark.line + 1) if mark else str(path)
        raise BadInput(where, None, "is not YAML; write one `GPU: price per hour` a line") from None
    except RecursionError:
        raise BadInput(
            FIELD, str(path), "is nested too deeply; write one `GPU: price per hour` a line"
        ) from None
    if not isinstance(node, yaml.MappingNode):
        raise BadInput(FIELD, str(path), "must hold one `GPU: price per hour` a line")
    prices: dict[str, float] = {}
    currency = "USD"
    for key, value in node.value:
        where = place(path, key.start_mark.line + 1)
        if not isinstance(key, yaml.ScalarNode) or not isinstance(value, yaml.ScalarNode):
            raise BadInput(where, None, "must read `GPU: price per hour`")
        if key.value == "currency":
            currency = str(value.value)
            continue
        name = _gpu_name(key.value, where)
        if name in prices:
            raise BadInput(where, key.value, "is priced twice")
        prices[name] = _price(value.value, f"{where} {key.value}")
    return Prices(prices, currency, str(path))


def _gpu_name(name: str, where: str) -> str:
    try:
        return find_gpu(name)[0].name
    except BadInput as error:
        raise BadInput(where, name, error.hint) from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _price(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= MAX_PRICE:
        raise BadInput(where, text, f"must be a price per GPU and hour above 0 and at most {MAX_PRICE:.0e}")
    return value


def cost(
    price_per_gpu_hour: float,
    gpus: int,
    *,
    input_rate: float,
    output_rate: float,
    request_rate: float,
    utilisation: float = 1.0,
    currency: str = "USD",
) -> Cost:
    """Costs of `gpus` GPUs that serve these rates (per second) when fully used, at `utilisation` of them.

    The rates are those sustained under the objectives, not a peak.
    """
    per_hour = price_per_gpu_hour * gpus

    def per(rate: float, unit: float) -> float | None:
        sold = rate * utilisation * 3600.0
        return per_hour / sold * unit if sold > 0 else None

    return Cost(
        currency,
        per_hour,
        per(input_rate, 1e6),
        per(output_rate, 1e6),
        per(input_rate + output_rate, 1e6),
        per(request_rate, 1e3),
        utilisation,
    )


def cost_lines(cost: Cost) -> list[str]:
    """The costs as labelled lines."""
    rows = (
        ("per hour", cost.per_hour),
        ("per million output tokens (whole bill on output)", cost.per_1m_output),
        ("per million input tokens (whole bill on input)", cost.per_1m_input),
        ("per million input and output tokens together", cost.per_1m_total),
        ("per thousand requests", cost.per_1k_requests),
    )
    return [
        f"{'unknown' if value is None else f'{value:,.4g} {cost.currency}':>16}  {label}"
        for label, value in rows
    ]
