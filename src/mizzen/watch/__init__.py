"""A run as a page or in a terminal, live or finished: reads what ranks have written, writes nothing beside it."""
