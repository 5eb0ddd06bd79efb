"""Users, passwords and permissions of standalone mode, tokens of operators, and the delays after failed logins."""
