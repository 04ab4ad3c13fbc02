"""What all other packages use: errors, progress, stopping, files, parsing of untrusted text, processes."""
