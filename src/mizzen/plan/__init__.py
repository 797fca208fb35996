"""The plan as a value: what would be done to a model, decided, explained, refused and priced before a rank exists."""
