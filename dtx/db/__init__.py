"""PostgreSQL: connections, pipelines, columns, migrations."""
