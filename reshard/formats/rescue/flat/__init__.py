"""Flat parameters, of FSDP1 and fairscale: what lies where in them, and whose it is."""
