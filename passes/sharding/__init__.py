"""Operator sharding along one mesh axis: legal options, the cheapest choice among them, and the sharded program."""
