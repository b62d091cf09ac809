"""Costs: three denominators, three labels, and a utilisation for each."""

import pytest

from sim.errors import BadInput
from sim.planning.prices import cost, cost_lines, read_prices


def test_costs_by_hand():
    # 3 GPUs at 2.00 make 6.00 an hour; 5,000 output tokens/s are 18 M an hour, 20,000 input ones 72 M.
    bill = cost(2.0, 3, input_rate=20_000, output_rate=5_000, request_rate=10)
    assert bill.per_hour == 6.0
    assert bill.per_1m_output == pytest.approx(6 / 18)
    assert bill.per_1m_input == pytest.approx(6 / 72)
    assert bill.per_1m_total == pytest.approx(6 / 90)
    assert bill.per_1k_requests == pytest.approx(6 / 36)


def test_idle_time_is_paid_for():
    full = cost(4.0, 2, input_rate=9_000, output_rate=1_200, request_rate=1)
    part = cost(4.0, 2, input_rate=9_000, output_rate=1_200, request_rate=1, utilisation=0.4)
    assert full.per_1m_output == pytest.approx(1.8519, abs=1e-4)
    assert full.per_1m_total == pytest.approx(0.2179, abs=1e-4)
    assert part.per_1m_output == pytest.approx(4.6296, abs=1e-4)
    assert part.per_hour == full.per_hour


def test_every_figure_has_its_label():
    lines = cost_lines(cost(4.0, 2, input_rate=0, output_rate=1_200, request_rate=1, currency="EUR"))
    assert len({line[16:] for line in lines}) == len(lines) == 5
    assert all("EUR" in line for line in lines if "unknown" not in line)
    assert "unknown" in next(line for line in lines if "per million input tokens" in line)


def write(tmp_path, text):
    path = tmp_path / "prices.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_price_file(tmp_path):
    prices = read_prices(write(tmp_path, "currency: EUR\nH100: 2.5\n# cheap\nL40S: 0.9\n"))
    assert prices.currency == "EUR"
    assert prices.of("L40S") == 0.9
    assert len(prices.per_gpu_hour) == 2
    with pytest.raises(BadInput, match="no price for B200"):
        prices.of("B200")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("H100: 2.5\nL40S: cheap\n", "line 2 L40S.*above 0"),
        ("H100: 2.5\nL40S: 0\n", "line 2 L40S"),
        ("H100: .nan\n", "line 1 H100"),
        ("H100: 2.5\nNoSuchGPU: 1\n", "line 2"),
        ("H100: 2.5\nH100: 3\n", "line 2.*twice"),
        ("H100: [1, 2]\n", "line 1"),
        ("H100: 2.5\n  L40S: {\n", "line"),
        ("- H100\n", "one `GPU: price"),
        ("", "empty"),
    ],
)
def test_bad_price_files_are_named_by_line(tmp_path, text, says):
    with pytest.raises(BadInput, match=says):
        read_prices(write(tmp_path, text))


def test_prices_beyond_all_reason_are_refused(tmp_path):
    with pytest.raises(BadInput, match="at most 1e\\+09"):
        read_prices("1e308")
    deep = tmp_path / "deep.yaml"
    deep.write_text("a: " + "[" * 20_000)
    with pytest.raises(BadInput, match=r"deep.yaml"):
        read_prices(deep)


def test_missing_price_file(tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        read_prices(tmp_path / "none.yaml")


def test_a_decimal_comma_is_no_file():
    with pytest.raises(BadInput, match=r"with a point: 2\.5"):
        read_prices("2,5")


def test_a_plain_number_is_the_price_of_any_gpu():
    prices = read_prices("2.5")
    assert prices.of("H100-SXM-80GB") == prices.of("L4") == 2.5
    assert prices.currency == "USD"
    for wrong in ("0", "-1", "nan", "inf"):
        with pytest.raises(BadInput, match="above 0"):
            read_prices(wrong)
