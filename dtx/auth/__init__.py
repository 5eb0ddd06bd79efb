"""Users, passwords and permissions of a dtx that is its own broker, and the delays behind wrong passwords."""
