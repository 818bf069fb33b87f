"""Pipelines: orders of schedules, programs of stages, and how torch.distributed.pipelining runs them."""
