"""A trained layer as a thing: its folder with provenance and hashes, its card, the Hub as a place for folders."""
