"""What of a program lies in the host's memory, and when it is copied there and back."""
