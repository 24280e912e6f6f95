"""Bringing a run back: what a checkpoint holds, whether it fits the run, and loading it."""
