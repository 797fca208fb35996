"""Where tensors rest outside the device, and the way there and back."""
