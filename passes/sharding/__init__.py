"""Sharding of operators along one mesh axis: what is legal, what is cheapest, and the program that does it."""
