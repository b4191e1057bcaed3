"""``python -m modelbay``."""

from modelbay.cli.main import main

if __name__ == "__main__":
    main()
