"""Questions that take many predictions: what if, how much, which flags, at what cost."""
