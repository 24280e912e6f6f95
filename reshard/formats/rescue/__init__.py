"""Checkpoints that other tools wrote, rank by rank or in a form of their own, put together as one."""
