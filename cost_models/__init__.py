"""Formulas that price what a graph does. Nothing here knows of graphs: numbers in, numbers out."""
