from common import quiet_grpc  # noqa: F401
from shard.server import main

if __name__ == "__main__":
    main()
