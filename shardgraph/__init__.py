"""shardgraph: a compiler for distributed training with PyTorch."""
