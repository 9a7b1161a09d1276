"""Entry of ``python -m bench.dashboard``."""

from bench.dashboard.benchmark import main

if __name__ == "__main__":
    main()
