"""What a step reports, and where that is written. The engine tells observers and asks nothing of them."""
