"""A run under way: where its batches come from, the step, the loop, the state on disk."""
