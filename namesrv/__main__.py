"""``python -m trimq.namesrv``."""

from trimq.namesrv.cli import main

if __name__ == "__main__":
    main()
