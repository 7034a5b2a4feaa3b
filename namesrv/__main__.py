"""``python -m namesrv``."""

from namesrv.cli import main

if __name__ == "__main__":
    main()
