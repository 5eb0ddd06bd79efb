"""The embedded PostgreSQL, from a wheel: dtx starts, supervises and stops it if no database server is given."""
