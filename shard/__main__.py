from common import quiet_libraries  # noqa: F401
from shard.server import main

if __name__ == "__main__":
    main()
