"""From records to figures: percentiles, regimes, intervals."""
