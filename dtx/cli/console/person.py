"""Who sits at the terminal."""

import getpass


def user_name() -> str:
    """For journal and trail."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # an account without a name
        return "somebody"
