"""A run under way: the source of its batches, the loop over them, the step, metrics, and the state on disk."""
