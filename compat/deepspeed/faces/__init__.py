"""What stands behind the import paths where a name of mizzen alone is not enough."""
