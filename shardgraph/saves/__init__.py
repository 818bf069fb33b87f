"""Checkpoints that outlive a crash: saved to the side, checksummed, renamed when whole; verified before loading."""
