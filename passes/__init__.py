"""Graph passes: ``analysis`` reads a graph, ``rewrite`` changes it. One pass is one file."""
