"""Computing the loss of a large vocabulary a chunk of rows at a time: what is row by row, and how it is written."""
