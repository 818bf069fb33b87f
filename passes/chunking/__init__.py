"""Chunked loss for a large vocabulary: which operations are row-wise, and how the chunks are written."""
