"""Faults in numbers: replicas that are not equal any more, and where a NaN or an infinity comes from."""
