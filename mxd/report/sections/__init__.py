"""The sections of a report: one file per question, each a function from a run to a section, or to none.

What a column or an axis is called, how its numbers are printed and what they mean stands in ``mxd/metrics.py``.
"""
