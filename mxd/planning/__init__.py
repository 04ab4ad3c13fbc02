"""What a run is made of and what it needs: replacements and who trains them, memory, time."""
