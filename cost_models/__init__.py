"""Formulas for the time and bytes of operations, collectives and schedules: numbers in, numbers out, no graphs."""
