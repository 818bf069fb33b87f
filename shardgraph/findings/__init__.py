"""Lint: what a model, its program and its optimizer do that trains otherwise than expected, or costs for nothing."""
