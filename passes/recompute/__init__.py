"""Which values of forward backward computes again: found by an integer program, or told by a name or by hand."""
