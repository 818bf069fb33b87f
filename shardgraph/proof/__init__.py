"""The symbolic proof that a program computes what the captured graph does, without running either."""
