"""Expert parallelism along one mesh axis: what can run on a rank's own experts, and the program that does it."""
