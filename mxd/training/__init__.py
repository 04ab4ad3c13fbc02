"""A run under way: where its batches come from, the loop over them, the step, metrics, the state on disk."""
