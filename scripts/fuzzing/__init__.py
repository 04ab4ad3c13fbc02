"""Hostile input: what it is made of (strategies.py), and what reads it (targets.py)."""
