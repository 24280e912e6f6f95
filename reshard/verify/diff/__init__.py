"""How do two checkpoints differ? `run` pairs and compares them."""
