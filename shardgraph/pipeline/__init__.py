"""Pipelines at run time: stage programs, and the schedules of torch.distributed.pipelining that run them."""
