"""The operators' web pages, on the port of the API and with the same functions."""
