"""Entry of ``python -m bench.rl``."""

from bench.rl.benchmark import main

if __name__ == "__main__":
    main()
