"""The sections of a report: one file per question, each a function from a run to a section, or to none."""
