"""What a run consists of and what it needs: replacements and the processes that train them, memory, time."""
