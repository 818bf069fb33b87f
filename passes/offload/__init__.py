"""Offloading to host memory: which values, and when they are copied there and back."""
