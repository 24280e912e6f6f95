"""What is in a checkpoint, for `reshard inspect`."""
