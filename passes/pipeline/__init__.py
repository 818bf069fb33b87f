"""Pipeline parallelism: where a model may be cut, the stage of each operation, and the joint graph of each stage."""
