"""Optimizers that read what a program knows of its gradients, share their state, or bring replicas together."""
