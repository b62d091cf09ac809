"""Fits judged on measured runs that they have not seen; one module per published data set."""
