"""A paper's figures and tables made anew: what is trained, and how what comes out compares with what the paper says."""
