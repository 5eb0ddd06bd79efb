"""Standalone mode: exchanges, queues, messages and users in PostgreSQL."""
