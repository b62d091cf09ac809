"""From pasted command lines to typed values: nothing here runs a shell or guesses silently."""
