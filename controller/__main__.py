"""``python -m trimq.controller``."""

from trimq.controller.cli import main

if __name__ == "__main__":
    main()
