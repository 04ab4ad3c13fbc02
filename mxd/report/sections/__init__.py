"""The sections of a report: one file per question, each a function from a run to a section, or to none.

Titles, formats and meanings of numbers are in ``mxd/metrics``.
"""
