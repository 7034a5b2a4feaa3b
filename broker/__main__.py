"""``python -m broker`` is ``mqbroker``."""

from broker.cli import main

if __name__ == "__main__":
    main()
