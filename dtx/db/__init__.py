"""PostgreSQL for every room that stores something: connections, pipelines, columns, migrations."""
