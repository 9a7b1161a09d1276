"""Entry of ``python -m bench.load``."""

from bench.load.benchmark import main

if __name__ == "__main__":
    main()
