"""Moving a state dict to and from a checkpoint folder, through ``torch.distributed.checkpoint``."""
