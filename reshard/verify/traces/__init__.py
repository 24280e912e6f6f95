"""Loss traces: reading, comparing, drawing."""
