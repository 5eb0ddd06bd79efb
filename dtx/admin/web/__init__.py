"""The operators' web pages, on the port of the API and over the same functions."""
