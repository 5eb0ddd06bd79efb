"""Alembic runs this for each command. dtx.db.migrate has opened the connection, and holds the advisory lock."""

from alembic import context
from sqlalchemy import Connection, text

from dtx.auth.users import account
from dtx.db.columns import SCHEMA

connection = context.config.attributes["connection"]
assert isinstance(connection, Connection)
connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
context.configure(connection=connection, target_metadata=account.metadata, version_table_schema=SCHEMA)
with context.begin_transaction():
    context.run_migrations()
