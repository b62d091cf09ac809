"""One engine's launch command in the words of the other."""
