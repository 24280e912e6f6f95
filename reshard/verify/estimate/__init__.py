"""How many bytes a training state takes, in a checkpoint and in memory, for `reshard estimate`."""
