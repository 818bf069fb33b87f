"""Expert parallelism along one mesh axis: what may be done on the ranks' own experts, and the program that does it."""
