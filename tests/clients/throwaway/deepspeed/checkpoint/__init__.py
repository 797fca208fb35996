"""What Accelerate needs to hand a state dict out."""
