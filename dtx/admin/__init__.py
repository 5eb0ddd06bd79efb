"""The operators' HTTP API: branches in doubt, their messages, and orders that decide about them."""
