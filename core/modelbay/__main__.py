"""``python -m modelbay``."""

from modelbay.cli.main import main

main()
