"""One file per question: is it faithful, does it decompose, ..."""
