"""Optimizers that read what a sharded program knows of its gradients."""
