"""ZeRO stage 3 on torch's FSDP2: parameters are sharded too, and gathered unit by unit when they are needed."""
