"""Pipeline parallelism: the model cut into stages, and the schedules that run them."""
