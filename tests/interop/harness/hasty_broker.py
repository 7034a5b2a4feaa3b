"""mqbroker with a bucket whose objects are joined, and whose root is replaced, after a few objects instead of many.

It is run as a program, with the arguments of mqbroker.
"""

from trimq.broker.cli import main
from trimq.broker.store.tiered.bucket import joiner, upkeep, uploader

JOIN_OBJECTS = 16
OBJECTS_A_ROOT = 4
PART_SIZE = 5 * 1024 * 1024  # the least that S3 allows

if __name__ == "__main__":
    for module, name, value in (
        (joiner, "JOIN_OBJECTS", JOIN_OBJECTS),
        (joiner, "PART_SIZE", PART_SIZE),
        (uploader, "OBJECTS_A_ROOT", OBJECTS_A_ROOT),
        (uploader, "_LOOK", 0.05),
        (upkeep, "_UPKEEP", 0.2),
    ):
        if not hasattr(module, name):
            raise AttributeError(f"{module.__name__} has no {name}")
        setattr(module, name, value)
    main()
