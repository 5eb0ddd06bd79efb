"""``python -m dtx`` is the command ``dtx``."""

from dtx.cli import main

if __name__ == "__main__":
    main()
