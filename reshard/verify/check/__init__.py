"""Is a checkpoint sound? `run` collects what the other modules find."""
