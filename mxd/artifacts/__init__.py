"""Trained layers as files: folders with provenance and hashes, their cards, and their transfer to and from the Hub."""
