"""PostgreSQL from a wheel: started, looked after and ended by dtx, where no database server is named."""
