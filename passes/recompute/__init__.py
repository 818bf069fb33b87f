"""Activation recomputation: which operations backward recomputes, by integer program, by mode or by hand."""
