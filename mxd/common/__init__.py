"""What everything else stands on: errors, progress, stopping, files, parsing of untrusted text, processes."""
