"""Entry of ``python -m bench.limits``."""

from bench.limits.benchmark import main

if __name__ == "__main__":
    main()
