"""`python -m infcl_gen` is `infcl-gen`."""

from infcl_gen.cli import main

if __name__ == "__main__":
    main()
