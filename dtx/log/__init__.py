"""The transaction log."""
