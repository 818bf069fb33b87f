"""Pipelines: where a model may be cut, which operation is in which stage, and each stage's own joint graph."""
