"""Text, contexts of token ids, shuffled batches of activations, and a cache of those."""
