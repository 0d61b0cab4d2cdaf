"""What a run leaves behind: its directory, its checkpoints, what it tells while it trains."""
