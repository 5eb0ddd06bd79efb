"""Connections between the members of a resource manager, over which they forward requests."""
