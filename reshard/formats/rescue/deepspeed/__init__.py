"""DeepSpeed: ZeRO of all stages, and universal folders."""
